"""These tests run in a process of their own: see the Makefile."""

import os

if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras":
    import two_devices

    two_devices.split_cpu()
else:
    collect_ignore_glob = ["test_*.py"]

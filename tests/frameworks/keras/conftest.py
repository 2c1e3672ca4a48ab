"""Two virtual devices for the replicas."""

import os

if os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow":
    import two_devices

    two_devices.split_cpu()
else:
    collect_ignore_glob = ["test_*.py"]

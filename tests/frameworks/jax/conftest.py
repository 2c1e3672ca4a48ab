"""What has to be settled before JAX is imported: four devices on one processor."""

import os

import pytest

_DEVICES = "--xla_force_host_platform_device_count=4"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()


@pytest.fixture(autouse=True)
def _compiled_quickly(compiled_quickly):
    """All but what uses `optimized`."""

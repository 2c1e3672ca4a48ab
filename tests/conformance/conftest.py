import contextlib

import pytest

from compile_options import compiling_quickly
from conformance.wrappers import BACKEND, KERAS, WRAPPERS

if KERAS != "none" and BACKEND not in ("jax", "torch"):
    import two_devices

    two_devices.split_cpu()


@pytest.fixture(params=WRAPPERS, ids=lambda wrapper: wrapper.name)
def wrapper(request):
    """Each wrapper of this process' backend in turn."""
    row = request.param
    # Where steps are not compiled each operation is a program of its own, and rounds as it does.
    has_programs_of_its_own = row.compiles and not row.like
    is_optimized = "optimized" in request.fixturenames and has_programs_of_its_own
    with contextlib.nullcontext() if is_optimized else compiling_quickly():
        yield row

import contextlib

import pytest

from conformance.shells import SHELLS
from quickly import compiling_quickly


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.name)
def shell(request):
    """Each shell of this process' backend in turn."""
    # Where steps are not compiled each operation is a program of its own, and rounds as it does.
    is_quick = "optimized" not in request.fixturenames or not request.param.compiles
    with compiling_quickly() if is_quick else contextlib.nullcontext():
        yield request.param

import contextlib

import pytest

from conformance.shells import SHELLS
from quickly import compiling_quickly


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.name)
def shell(request):
    """Each shell of this process' backend in turn."""
    row = request.param
    # Where steps are not compiled each operation is a program of its own, and rounds as it does.
    has_programs_of_its_own = row.compiles and not row.like
    is_optimized = "optimized" in request.fixturenames and has_programs_of_its_own
    with contextlib.nullcontext() if is_optimized else compiling_quickly():
        yield row

import pytest

from conformance.shells import SHELLS


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.name)
def shell(request):
    """Each shell of this process' backend in turn."""
    return request.param

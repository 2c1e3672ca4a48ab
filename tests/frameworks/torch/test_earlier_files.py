"""What earlier releases left on disk loads as they read it themselves."""

import pytest

from earlier_files import read


@pytest.mark.parametrize("name", read.of("torch", ""))
def test_a_file_loads(name):
    read.check_torch(name)

"""What earlier releases left on disk loads as they read it themselves."""

import pickle

import pytest

from earlier_files import read


@pytest.mark.parametrize("name", read.of("rules", ""))
def test_a_pickle_loads_without_a_framework(name):
    path, shown = read.path_and_facts("rules", name)
    assert repr(pickle.loads(path.read_bytes())) == shown

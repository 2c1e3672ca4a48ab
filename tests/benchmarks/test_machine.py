"""Memory: the peak of what is resident, and what is left."""

import numpy as np
import pytest

from benchmarks.machine import available, peak_above_rest

MEBIBYTE = 2**20


def allocate(mebibytes):
    """Fills memory and gives it back."""
    np.ones(mebibytes * MEBIBYTE, np.uint8)


def test_it_is_what_was_held_at_once():
    nothing = peak_above_rest(lambda: None)
    if nothing is None:
        pytest.skip("this system does not tell")
    assert nothing < 16 * MEBIBYTE
    for _ in range(2):
        peak = peak_above_rest(lambda: [allocate(64), allocate(64)])
        assert 60 * MEBIBYTE < peak < 100 * MEBIBYTE


def test_some_memory_is_available():
    assert available() > 0

"""The generators of random numbers that a program on any framework may draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """After it, the generators of Python and NumPy have the states that they had before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)

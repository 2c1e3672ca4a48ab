"""States of random generators that are put back after a time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """After it, the generators of Python and NumPy have the states that they had before."""
    # NumPy is imported with a framework, not with this library.
    import numpy as np

    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)

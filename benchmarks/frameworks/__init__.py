"""How each framework runs a step: a module for each, with a `FRAMEWORK`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.rows import Row
from benchmarks.timing import Program


class Framework(NamedTuple):
    """What a framework does for a measurement.

    Args:
        program: Returns the program of a row's method, given the row, the name of the method and
            whether models are tiny.
        start: Called before the first operation.
        devices: Returns the kinds of device there are, with the GPU's name.
        on_device: Within it arrays are made on a device of this kind.
        forget: Lets go of what is kept of programs that are gone.
    """

    program: Callable[[Row, str, bool], Program]
    start: Callable[[], None] = lambda: None
    devices: Callable[[], dict[str, str]] = lambda: {"cpu": ""}
    on_device: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    forget: Callable[[], None] = lambda: None

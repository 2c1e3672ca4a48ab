"""Code of users around ours: what AutoGraph translates of it, and whose line a warning is about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def as_written(function: _Function) -> _Function:
    """Marks a function that is not to be translated, nor what it calls, in a user's `tf.function`.

    Nothing in this library branches on a tensor in Python, and to translate all of it takes
    seconds of the first trace. The mark is the one that AutoGraph gives to what it has translated
    already. `tf.autograph.experimental.do_not_convert` would also leave alone each `tf.function`
    of the user's that is called from there. Where a release does not know the mark, tracing takes
    longer and does the same.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


def stack_level(*packages: str) -> int:
    """Returns the `stacklevel` with which a warning of the caller names a user's line.

    Args:
        packages: Names of packages that may stand between, besides this library.
    """
    between = {"lossscale", *packages}
    frame, level = inspect.currentframe(), 0
    # The first frame is this one, the next that of the caller, whose level is 1.
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        frame, level = frame.f_back, level + 1
    return max(level, 1)

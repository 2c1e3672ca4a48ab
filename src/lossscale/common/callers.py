"""Whose line a warning is about: the first one outside of the libraries that called on the way."""

from __future__ import annotations

import inspect


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

"""AutoGraph, which translates the code around a traced function: what it leaves alone here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def do_not_convert(function: _Function) -> _Function:
    """Marks a function that is not to be translated, nor what it calls, in a user's `tf.function`.

    Nothing in this library branches on a tensor in Python, and to translate all of it takes
    seconds of the first trace. The mark is the one that AutoGraph gives to what it has translated
    already. `tf.autograph.experimental.do_not_convert` would also leave alone each `tf.function`
    of the user's that is called from there. Where a release does not know the mark, tracing takes
    longer and does the same.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function

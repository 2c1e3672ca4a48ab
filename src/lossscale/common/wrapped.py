"""Which optimizers have a wrapper that lives, so that none gets a second one."""

from __future__ import annotations

import weakref
from typing import Any

from lossscale.errors import AlreadyWrappedError

# By identity: an optimizer may be unhashable, or equal to another one.
_wrappers: dict[int, tuple[weakref.ref[object], weakref.ref[object]]] = {}


def living_wrapper(inner: object) -> Any:
    """Returns the living wrapper of an optimizer, or None."""
    found = _wrappers.get(id(inner))
    return found[1]() if found is not None and found[0]() is inner else None


def check_not_wrapped(inner: object, wrappers: type | tuple[type, ...] = ()) -> None:
    """Checks that an optimizer has no loss scaling and no living wrapper.

    Args:
        inner: The optimizer.
        wrappers: The framework's own class of loss scale optimizers, if it has one.

    Raises:
        AlreadyWrappedError: If it has.
    """
    if isinstance(inner, wrappers):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap its inner optimizer. Received: {inner!r}."
        )
    wrapper = living_wrapper(inner)
    if wrapper is not None:
        raise AlreadyWrappedError(
            f"Another {type(wrapper).__name__} already wraps this {type(inner).__name__}. Use that "
            "one, or make a new optimizer to wrap."
        )


def remember_wrapper(inner: object, wrapper: object) -> None:
    """Records that `wrapper` wraps `inner`, as long as the wrapper lives."""
    key = id(inner)
    _wrappers[key] = weakref.ref(inner, lambda _: _wrappers.pop(key, None)), weakref.ref(wrapper)

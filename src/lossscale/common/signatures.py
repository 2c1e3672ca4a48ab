"""Which arguments a function of a user's takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping


def takes(function: Callable[..., object], name: str) -> bool:
    """Whether a function has an argument of this name, or takes any."""
    arguments = signature_of(function)
    return name in arguments or any(each.kind == each.VAR_KEYWORD for each in arguments.values())


def signature_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The arguments of a function by name; those of a method are read once, with `self`."""
    method = getattr(function, "__func__", None)
    return inspect.signature(function).parameters if method is None else _arguments(method)


# Only of methods, which live as long as their class.
@functools.lru_cache
def _arguments(method: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method).parameters

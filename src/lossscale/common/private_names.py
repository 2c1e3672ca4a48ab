"""Undocumented names of a framework: access with an error if one is missing; AutoGraph's mark."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

from lossscale.errors import UnsupportedError

_Function = TypeVar("_Function", bound=Callable[..., object])
_MISSING = object()


def private_module(module: str, purpose: str) -> ModuleType:
    """Returns a private module of a framework.

    Args:
        module: Its name.
        purpose: Its use in lossscale, after "to".

    Raises:
        UnsupportedError: If there is none.
    """
    private_name(module, "__name__", purpose)
    return sys.modules[module]


def private_name(module: str, name: str, purpose: str, fallback: object = _MISSING) -> Any:
    """Returns a private object of a framework.

    Args:
        module: The name of its module.
        name: Its name there, with dots if it is nested.
        purpose: Its use in lossscale, after "to".
        fallback: The object to use in releases without it, if there is one.

    Raises:
        UnsupportedError: If there is none, and no fallback.
    """
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        root = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == root:
            raise
        if fallback is not _MISSING:
            return fallback
        raise _gone(root, f"{module}.{name}", purpose) from error


def check_attribute(root: str, holder: object, name: str, purpose: str) -> None:
    """Raises an error unless an object has the private attribute to replace.

    Args:
        root: The framework's root module.
        holder: The object.
        name: The attribute.
        purpose: Its use in lossscale, after "to".

    Raises:
        UnsupportedError: If there is none.
    """
    if not hasattr(holder, name):
        raise _gone(root, f"{type(holder).__name__}.{name}", purpose)


def _gone(root: str, what: str, purpose: str) -> UnsupportedError:
    version = getattr(sys.modules.get(root), "__version__", "of an unknown version")
    return UnsupportedError(
        f"{root} {version} has no {what}, which lossscale needs to {purpose}. "
        'The page "What runs where" says which releases were tested.'
    )


def do_not_convert(function: _Function) -> _Function:
    """Marks a function that is not to be translated, nor what it calls, in a user's `tf.function`.

    Nothing in this library branches on a tensor in Python, and to translate all of it takes
    seconds of the first trace. The mark is the one that AutoGraph gives to what it has translated
    already. `tf.autograph.experimental.do_not_convert` would also leave alone each `tf.function`
    of the user's that is called from there. Where a release does not know the mark, tracing takes
    longer and does the same.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]  # no name of Python
    return function

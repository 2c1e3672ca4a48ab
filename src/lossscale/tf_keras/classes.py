"""One class for both families of optimizers of tf_keras.

tf_keras asks `isinstance` which family an optimizer is of, so that its wrapper must be of the same
one. Programs and files name one class, and a user's subclass is for both.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tf_keras

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.errors import ArgumentTypeError
from lossscale.tf_keras.arguments import BaseLossScaleOptimizer

_Metaclass: ft.Class = type(BaseLossScaleOptimizer)
# The class for the optimizers of each family.
_families: list[ft.Class] = []


class CalledAsWritten(_Metaclass):
    """The class of our classes: a subclass may be called with any arguments.

    tf_keras' own passes the inner optimizer on by position. The type of an optimizer makes those of
    the other family too.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> ft.KerasOptimizer:
        return type.__call__(self._public_class(), *args, **kwargs)


def of_family(cls: ft.Class) -> ft.Class:
    """Adds the class for the optimizers of one family, known by the name of its base class."""
    _families.append(cls)
    return _named_as(cls, cls.__mro__[1])


def class_for(cls: ft.Class, args: Sequence[object], kwargs: Mapping[str, Any]) -> ft.Class:
    """Returns the class of the object that a call of `cls` with these arguments makes.

    Raises:
        ArgumentTypeError: If no argument is an optimizer of tf_keras.
    """
    if issubclass(cls, tuple(_families)):
        return cls
    # A subclass names its arguments as it likes.
    for each in (*args, *kwargs.values()):
        for family in _families:
            if isinstance(each, family._inner_base):
                return family if family._written is cls else _subclass(cls, family)
    named = kwargs.get("inner_optimizer", kwargs.get("optimizer"))
    raise ArgumentTypeError(registry.not_an_optimizer(args[0] if args else named))


@functools.cache
def _subclass(cls: ft.Class, family: ft.Class) -> ft.Class:
    """Returns the subclass of `cls` for the optimizers of one family, known by the same name."""
    written = itertools.takewhile(
        lambda base: not base.__module__.startswith("lossscale."), cls.__mro__
    )
    for function in [each for base in written for each in vars(base).values()]:
        code = getattr(function, "__code__", None)
        loaded = [each.argval for each in dis.get_instructions(code)] if code else []
        if ("super", "type") in itertools.pairwise(loaded):
            # The type of an object is the class that is made here, so this would not end.
            raise ArgumentTypeError(
                f"{function.__qualname__}() calls super(type(self), self), which calls itself "
                "without end if the class has a subclass. Write super() instead."
            )
    return _named_as(type(cls.__name__, (cls, family), {}), cls)


def _named_as(made: ft.Class, written: ft.Class) -> ft.Class:
    """Gives a class the names of its base class, which programs and files name."""
    made._written = written
    made.__name__, made.__qualname__ = written.__name__, written.__name__
    made.__module__, made.__doc__ = written.__module__, written.__doc__
    register_as(made, tf_keras.saving.get_registered_name(written))
    # A file names the class that was written, for both families.
    register_as(written, tf_keras.saving.get_registered_name(written))
    return made


def register_as(cls: ft.Class, registered: str) -> None:
    """Registers a class for tf_keras' files; a name without a package is of no registered class."""
    package, separator, name = registered.rpartition(">")
    if separator:
        tf_keras.saving.register_keras_serializable(package, name)(cls)

"""The class of a loss scale optimizer, by the family of its inner optimizer.

tf_keras asks `isinstance` whether an optimizer is a new or a legacy one, and so does TensorFlow
when it writes a SavedModel. No class can stand for both. So an object is made of the class that
was called. When it is given its inner optimizer, its type becomes a subclass of that class and of
tf_keras' own class of the family. Its `__class__`, by which files name it, stays the class that
was called.
"""

from __future__ import annotations

import functools
from typing import Any

import tf_keras

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.common.private_names import private_name
from lossscale.errors import ArgumentTypeError

_MODULE = "tf_keras.src.mixed_precision.loss_scale_optimizer"
_PURPOSE = "be an instance of tf_keras' class for an inner optimizer"
# Classes of inner optimizers, each with tf_keras' own class around it.
_FAMILIES: dict[ft.Class, ft.Class] = {
    tf_keras.optimizers.Optimizer: private_name(_MODULE, "LossScaleOptimizerV3", _PURPOSE),
    tf_keras.optimizers.legacy.Optimizer: private_name(_MODULE, "LossScaleOptimizer", _PURPOSE),
}


def join_family(optimizer: ft.KerasOptimizer, inner: ft.KerasOptimizer) -> None:
    """Makes an object one of the class for its inner optimizer; that class does not change again.

    Raises:
        ArgumentTypeError: If `inner` is not an optimizer of tf_keras, or is of the other family
            than the class of the object.
    """
    cls: ft.Class = type(optimizer)
    base = next((base for kind, base in _FAMILIES.items() if isinstance(inner, kind)), None)
    if base is None:
        raise ArgumentTypeError(registry.not_an_optimizer(inner))
    if isinstance(optimizer, base):
        return
    if isinstance(optimizer, tuple(_FAMILIES.values())):
        written = written_class(cls)
        raise ArgumentTypeError(
            "A LossScaleOptimizer and its type take inner optimizers of one family only: new ones, "
            "or those of tf_keras.optimizers.legacy. Received: one of the other family. Call "
            f"{written.__module__}.{written.__qualname__} for another object."
        )
    optimizer.__class__ = _made(cls, base)


def written_class(cls: ft.Class) -> ft.Class:
    """Returns the class that was written, of one that may be made here."""
    return vars(cls).get("_written", cls)


class _BeforeWritten:
    """Stands in the order of bases before the class that was written.

    It is no base: an object changes its class only if the bases are laid out alike.
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # A hook of the user's has seen the class that was written.
        if "_written" not in vars(cls):
            super().__init_subclass__(**kwargs)


@functools.cache
def _made(cls: ft.Class, base: ft.Class) -> ft.Class:
    """Returns a subclass of a written class and a class of tf_keras, named as the first."""

    def order_of_bases(made: ft.Class) -> list[ft.Class]:
        first, *others = type.mro(made)
        return [first, *([] if _BeforeWritten in others else [_BeforeWritten]), *others]

    kinds = (type(base),) if type(cls) is type else (type(base), type(cls))
    # tf_keras' own call takes the inner optimizer as `inner_optimizer`, by position.
    metaclass = type("_Family", kinds, {"__call__": type(cls).__call__, "mro": order_of_bases})
    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"_written": cls, "__class__": property(lambda self: written_class(type(self)))}
    return metaclass(cls.__name__, (cls, base), {**named, **own})

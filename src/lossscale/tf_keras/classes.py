"""The class of a loss scale optimizer, by the family of its inner optimizer.

tf_keras asks `isinstance` whether an optimizer is a new or a legacy one, and TensorFlow writes the
answer into SavedModels. So no class can stand for both: an object is made of the class that was
called and tf_keras' own class of its family.
"""

from __future__ import annotations

import functools
from typing import Any

import tf_keras

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.common.private_names import private_name
from lossscale.errors import ArgumentTypeError
from lossscale.tf_keras.arguments import BaseLossScaleOptimizer

_MODULE = "tf_keras.src.mixed_precision.loss_scale_optimizer"
_PURPOSE = "be an instance of tf_keras' class for an inner optimizer"
# Classes of inner optimizers, each with tf_keras' own class around it.
_FAMILIES: dict[ft.Class, ft.Class] = {
    tf_keras.optimizers.Optimizer: private_name(_MODULE, "LossScaleOptimizerV3", _PURPOSE),
    tf_keras.optimizers.legacy.Optimizer: private_name(_MODULE, "LossScaleOptimizer", _PURPOSE),
}
_Metaclass: ft.Class = type(BaseLossScaleOptimizer)


class _CalledAsWritten(_Metaclass):
    # tf_keras' own takes the inner optimizer as `inner_optimizer`, and passes it on by position.
    __call__ = type.__call__


def class_for(cls: ft.Class, *given: Any) -> ft.Class:
    """Returns the class of the object that a call of `cls` with these arguments makes.

    Raises:
        ArgumentTypeError: If no argument is an optimizer of tf_keras, or if `cls` is the class of
            an object of the other family.
    """
    # A subclass names its arguments as it likes.
    for inner in given:
        for kind, base in _FAMILIES.items():
            if isinstance(inner, kind):
                return _with_base(cls, base)
    raise ArgumentTypeError(registry.not_an_optimizer(given[0] if given else None))


@functools.cache
def _with_base(cls: ft.Class, base: ft.Class) -> ft.Class:
    """Returns the subclass of `cls` and a class of tf_keras, known by the name of `cls`."""
    if issubclass(cls, base):
        return cls
    if issubclass(cls, BaseLossScaleOptimizer):
        raise ArgumentTypeError(
            "The type of a LossScaleOptimizer takes inner optimizers of its own family only: new "
            "ones, or those of tf_keras.optimizers.legacy. Received: one of the other family. Call "
            f"{cls._written.__module__}.{cls._written.__qualname__} instead."
        )
    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = _CalledAsWritten(cls.__name__, (cls, base), {**named, "_written": cls})
    package, separator, name = tf_keras.saving.get_registered_name(cls).rpartition(">")
    if separator:
        # Of both families, a file names the class that was written.
        for each in (made, cls):
            tf_keras.saving.register_keras_serializable(package, name)(each)
    return made

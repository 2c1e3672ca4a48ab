"""One class for both families of optimizers of tf_keras.

tf_keras asks `isinstance` which family an optimizer is of, so that its wrapper must be of the same
one. Programs and files name one class, and a user's subclass is for both.
"""

from __future__ import annotations

import dis
import functools
import itertools
from typing import TYPE_CHECKING, Any, Self

import tf_keras

from lossscale import registry
from lossscale.errors import ArgumentTypeError
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.tf_keras.current import CurrentWrapper
from lossscale.tf_keras.legacy import LegacyWrapper
from lossscale.tf_keras.optimizer import TFKerasCommonOptimizer

if TYPE_CHECKING:

    class _OfFamily(Any):
        """The class of tf_keras that an object has as a base, too."""

else:
    _OfFamily = object


@FrontDoor.register
class LossScaleOptimizer(TFKerasCommonOptimizer, _OfFamily):
    """The loss scale optimizer around a tf_keras optimizer.

    The class to inherit from; `lossscale.LossScaleOptimizer` creates objects of it. An object
    belongs to the family of its inner optimizer: it is a `tf_keras.optimizers.Optimizer` or a
    `tf_keras.optimizers.legacy.Optimizer`, and a `tf_keras.mixed_precision.LossScaleOptimizer`.

    Args:
        inner_optimizer: The optimizer to wrap, an instance of either family.
        dynamic: As for `lossscale.LossScaleOptimizer`, like the arguments below.
        initial_scale: The first, or the fixed, loss scale.
        dynamic_growth_steps: The number of finite steps in a row after which the scale doubles.
        rule: A `ScaleRule`, instead of the three arguments above.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is not a tf_keras optimizer or already has loss scaling, or
            an argument has the wrong type.
        ValueError: If a scale or a number of steps is invalid.

    Examples:
        >>> optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5), initial_scale=8)
        >>> isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)
        True
    """

    # The public module, which pickles and files name.
    __module__ = "lossscale.tf_keras"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if not issubclass(cls, (CurrentWrapper, LegacyWrapper)):
            # A subclass names its arguments as it likes.
            given = [*args, *kwargs.values()]
            families = [
                family
                for each in given
                for family in (CurrentWrapper, LegacyWrapper)
                if isinstance(each, family._inner_base)
            ]
            if not families:
                named = kwargs.get("inner_optimizer", kwargs.get("optimizer"))
                raise ArgumentTypeError(registry.not_an_optimizer(args[0] if args else named))
            written: Any = cls
            cls = _of_family(written, families[0])
        made: Self = super().__new__(cls)
        return made

    @classmethod
    def _public_class(cls) -> type[Any]:
        return cls.__mro__[1] if "_is_of_family" in vars(cls) else cls


@functools.cache
def _of_family(cls: type[Any], family: type[Any]) -> type[Any]:
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
    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "_is_of_family": True,
        # For `super(self.__class__, self)`, which programs of that time write in subclasses.
        "__class__": property(lambda self: type(self)._public_class()),
    }
    made = type(cls.__name__, (cls, family), namespace)
    _register_as(made, tf_keras.saving.get_registered_name(cls))
    # A file names the class that was written, for both families.
    _register_as(cls, tf_keras.saving.get_registered_name(cls))
    return made


def _register_as(cls: type[Any], registered: str) -> None:
    package, separator, name = registered.rpartition(">")
    if separator:
        tf_keras.saving.register_keras_serializable(package, name)(cls)


_register_as(LossScaleOptimizer, "lossscale>LossScaleOptimizer")

"""The names of TensorFlow 2.0 to 2.3, with the same core.

`LossScaleOptimizer(optimizer, loss_scale)` takes a number, `"dynamic"` or a `LossScale`, and its
`loss_scale` is that object: call it for the current value.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from lossscale import registry
from lossscale.errors import ArgumentTypeError
from lossscale.experimental.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from lossscale.optimizer import refuse_subclass

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleOptimizer"]

if TYPE_CHECKING:
    from lossscale.experimental import keras as keras
    from lossscale.experimental import tf_keras as tf_keras
    from lossscale.optimizer import KerasOptimizer
else:

    def __getattr__(name: str) -> Any:
        # The base classes for users, in modules that import a Keras.
        if name in [framework.root for framework in registry.KERASES]:
            return registry.submodule(__name__, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LossScaleOptimizer(abc.ABC):  # noqa: B024 - for `register`
    """An optimizer that applies loss scaling, with the loss scale as an object.

    It has the members of `lossscale.LossScaleOptimizer`, for an optimizer of Keras 3 or tf_keras.
    The call returns a `lossscale.experimental.keras.LossScaleOptimizer` or a
    `lossscale.experimental.tf_keras.LossScaleOptimizer`, which are instances of this class for
    `isinstance`. Inherit from one of them, not from this class.

    Args:
        optimizer: The optimizer to wrap, an instance.
        loss_scale: A number for a fixed loss scale, `"dynamic"` for `DynamicLossScale()`, or a
            `LossScale`.
        name: The optimizer's name.

    Raises:
        TypeError: If `optimizer` is not an optimizer or already has loss scaling. Also if a class
            inherits from this one.
        ValueError: If `loss_scale` is invalid.

    Examples:
        >>> import keras, tensorflow as tf
        >>> opt = LossScaleOptimizer(keras.optimizers.SGD(0.25), "dynamic")
        >>> weight = tf.Variable(1.0)
        >>> steps = opt.minimize(lambda: weight**2, [weight])
        >>> float(weight), float(opt.loss_scale())
        (0.5, 32768.0)

    Source: `tf.keras.mixed_precision.experimental.LossScaleOptimizer`, TensorFlow 2.0 to 2.3.
    """

    def __new__(
        cls,
        optimizer: KerasOptimizer,
        loss_scale: float | str | LossScale,
        name: str | None = None,
        **others: Any,
    ) -> Any:
        framework = registry.framework_of(optimizer)
        if framework not in registry.KERASES:
            raise ArgumentTypeError(
                "lossscale.experimental.LossScaleOptimizer wraps Keras optimizers only. Received: "
                f"an optimizer of {framework.title}. Use lossscale.LossScaleOptimizer."
            )
        made = registry.package(f"{__name__}.{framework.root}").LossScaleOptimizer
        return made(optimizer, loss_scale, name, **others)

    def __init_subclass__(cls) -> None:
        refuse_subclass(cls, __name__, registry.KERASES)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Any:
        """Creates an optimizer from its configuration; see `lossscale.LossScaleOptimizer`."""
        framework = registry.default_keras(config)
        made = registry.package(f"{__name__}.{framework.root}").LossScaleOptimizer
        return made.from_config(config, custom_objects)

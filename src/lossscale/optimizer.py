"""The public class, which creates the wrapper for the optimizer's framework."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import lossscale.registry as registry
from lossscale.errors import ArgumentTypeError
from lossscale.rules import ScaleRule
from lossscale.wrapper import Wrapper

if TYPE_CHECKING:
    import torch

    import lossscale.keras
    import lossscale.torch


def refuse_subclass(cls: type, package: str, frameworks: Sequence[registry.Framework]) -> None:
    """Raises the error about a class that inherits from one that only picks a wrapper.

    Args:
        cls: The class.
        package: The package of its base class.
        frameworks: The frameworks with a class to inherit from in that package.
    """
    named = ", ".join(
        f"{package}.{each.root}.LossScaleOptimizer ({each.title})" for each in frameworks
    )
    raise ArgumentTypeError(
        f"{package}.LossScaleOptimizer cannot be a base class: it selects a class by framework. "
        f"Received: class {cls.__name__}. Inherit from the class of its framework: {named}."
    )


class LossScaleOptimizer(Wrapper, abc.ABC):
    """An optimizer that applies loss scaling to prevent numeric underflow in float16.

    Small gradients flush to zero in float16. Loss scaling multiplies the loss by a number, the
    loss scale, which multiplies every gradient of the backward pass too, and divides the final
    gradients by it before they are applied. A dynamic scale is adjusted during training: it is
    lowered if a gradient is not finite (that step is skipped) and grows after a long run of finite
    steps.

    Pass it to `model.compile` instead of the optimizer that it wraps. In a custom training loop,
    `minimize` does everything; with a gradient tape, scale the loss with `get_scaled_loss` and
    unscale the gradients with `get_unscaled_gradients` before `apply_gradients`.

    The call returns an optimizer of the framework of `inner_optimizer`: a
    `lossscale.keras.LossScaleOptimizer`, `lossscale.tf_keras.LossScaleOptimizer` or
    `lossscale.torch.LossScaleOptimizer`. Each is an instance of this class for `isinstance`.
    Inherit from one of them, not from this class. With Keras, settings such as `momentum` or
    `clipnorm` are read from and written to `inner_optimizer`.

    With PyTorch, call `backward(loss)` and `step()`.

    Args:
        inner_optimizer: The optimizer to wrap, an instance.
        dynamic: Whether the scale is adjusted during training. If False, `initial_scale` is the
            fixed scale, and gradients are not checked.
        initial_scale: The first (or the fixed) loss scale, from 2**-126 to 2**126. None means
            2**15.
        dynamic_growth_steps: The number of finite steps in a row after which the scale doubles.
            None means 2000.
        rule: A `DynamicScale`, a `FixedScale` or a custom rule, instead of the three arguments
            above.
        name: The optimizer's name.
        of_framework: Arguments that only one framework has; PyTorch has `clip_norm`,
            `process_group` and `decide`.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer or already has loss scaling, `dynamic`
            is not a bool, or `rule` is not a `ScaleRule`. Also if a class inherits from this one.
        ValueError: If a scale or a number of steps is invalid.

    Examples:
        >>> import keras, lossscale, tensorflow as tf
        >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.25))
        >>> weight = tf.Variable(1.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight**2
        ...     scaled_loss = optimizer.get_scaled_loss(loss)
        >>> scaled_gradients = tape.gradient(scaled_loss, [weight])
        >>> gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        >>> applied = optimizer.apply_gradients(zip(gradients, [weight]))
        >>> float(weight), float(optimizer.loss_scale), int(optimizer.dynamic_counter)
        (0.5, 32768.0, 1)

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, TensorFlow 2.4 to 2.15.
    """

    @overload
    def __new__(
        cls,
        inner_optimizer: KerasOptimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        rule: ScaleRule | None = None,
        name: str | None = None,
    ) -> AroundKeras: ...
    @overload
    def __new__(
        cls,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        rule: ScaleRule | None = None,
        clip_norm: float | None = None,
        process_group: torch.distributed.ProcessGroup
        | Sequence[torch.distributed.ProcessGroup]
        | None = None,
        decide: Literal["host", "device"] = "host",
        name: str | None = None,
    ) -> AroundTorch: ...

    def __new__(
        cls,
        inner_optimizer: KerasOptimizer | torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        rule: ScaleRule | None = None,
        name: str | None = None,
        **of_framework: Any,
    ) -> Any:
        wrapper = registry.framework_of(inner_optimizer).wrapper()
        scale = dynamic, initial_scale, dynamic_growth_steps
        return wrapper(inner_optimizer, *scale, rule=rule, name=name, **of_framework)

    def __init_subclass__(cls) -> None:
        refuse_subclass(cls, "lossscale", registry.FRAMEWORKS)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AroundKeras:
        """Creates an optimizer from its configuration, without saved state.

        Args:
            config: A dictionary from `get_config` of a Keras or tf_keras wrapper.
            custom_objects: Classes in the configuration that are not part of the framework, by
                class name.

        Returns:
            An optimizer of the framework that the configuration belongs to.
        """
        wrapper = registry.default_keras(config).wrapper()
        optimizer: AroundKeras = wrapper.from_config(config, custom_objects)
        return optimizer


if TYPE_CHECKING:

    class KerasOptimizer(Protocol):
        """An optimizer of Keras 3 or tf_keras.

        By what it has, because its class would be any class where that Keras is not installed.
        """

        def apply_gradients(self, grads_and_vars: Any) -> Any: ...

    class AroundKeras(lossscale.keras.LossScaleOptimizer, LossScaleOptimizer, Any):
        """The wrapper of an optimizer of Keras 3 or tf_keras.

        Any, because tf_keras has other base classes, and because neither Keras has annotations: a
        type checker takes the optimizer of `compile` for a string, the type of its default.
        """

    class AroundTorch(lossscale.torch.LossScaleOptimizer, LossScaleOptimizer):
        """The wrapper of a PyTorch optimizer."""

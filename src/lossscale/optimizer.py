"""The public class: it picks the wrapper for the optimizer's framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import lossscale.registry as registry
from lossscale.arguments import arguments_from_config, check_config, growth_steps
from lossscale.members import OptimizerMembers, hides_what_only_raises
from lossscale.rules import ScaleRule

if TYPE_CHECKING:
    import keras
    import torch


def public(package: str, qualname: str | None = None) -> Callable[[type[Any]], type[Any]]:
    """Gives a wrapper its public name, so that its file may move, and pickles and files load.

    Args:
        package: Where it is found by its `__qualname__`.
        qualname: That name, if it is not the one of the class statement.
    """

    def renamed(cls: type[Any]) -> type[Any]:
        cls.__module__, cls.__name__ = package, "LossScaleOptimizer"
        cls.__qualname__ = qualname or cls.__qualname__
        return cls

    return renamed


def _constructed(
    self: Any,
    inner_optimizer: Any,
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
    *,
    rule: ScaleRule | None = None,
    name: str | None = None,
) -> None:
    """Declared for `help()` and for subclasses: each wrapper has a constructor of its own."""


class LossScaleOptimizer(OptimizerMembers):
    """An optimizer that applies loss scaling to prevent numeric underflow in float16.

    Small gradients flush to zero in float16. Loss scaling multiplies the loss by a number, the
    loss scale, so that every gradient on the way back is multiplied by it too, and divides the
    final gradients by it before they are applied. A dynamic scale moves by itself: it backs off
    when a gradient is not finite (that step is skipped) and grows after a long run of finite
    steps.

    Give it to `model.compile` in place of the optimizer it wraps. In a training loop of your own,
    `minimize` does everything; with a gradient tape, scale the loss with `get_scaled_loss` and
    unscale the gradients with `get_unscaled_gradients` before `apply_gradients`.

    The object is an optimizer of the framework of `inner_optimizer`, for Keras 3 a
    `keras.optimizers.LossScaleOptimizer`. Its settings, such as `momentum` or `clipnorm`, read
    and write those of `inner_optimizer`.

    Args:
        inner_optimizer: The optimizer to wrap, an instance.
        dynamic: Whether the scale moves by itself. If False, `initial_scale` is the fixed scale
            and, unless a rule says otherwise, gradients are not checked.
        initial_scale: The first (or the fixed) loss scale, a dimensionless number from 2**-126
            to 2**126. None stands for 2**15.
        dynamic_growth_steps: How many finite steps in a row double the scale, in steps. None
            stands for 2000.
        rule: A `DynamicScale`, a `FixedScale` or a rule of your own, instead of the three
            arguments above.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is no optimizer or already has loss scaling, `dynamic`
            is not a bool, or `rule` is no rule.
        ValueError: If a scale or a number of steps cannot be used.

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

    _framework: ClassVar[str | None] = None
    # What `dir` does not name.
    _hidden: ClassVar[frozenset[str]] = frozenset()
    # How the scale that is in use now is set.
    _sets_scale: ClassVar[str]

    _rule: ScaleRule

    if TYPE_CHECKING:
        # What is made is an optimizer of the framework of the one inside.
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
            process_group: Any = None,
            decide: str = "host",
            name: str | None = None,
        ) -> AroundTorch: ...
        @overload
        def __new__(  # type: ignore[overload-cannot-match]
            cls,
            inner_optimizer: keras.optimizers.Optimizer,
            dynamic: bool = True,
            initial_scale: float | None = None,
            dynamic_growth_steps: int | None = None,
            *,
            rule: ScaleRule | None = None,
            name: str | None = None,
        ) -> AroundKeras: ...
        @overload
        def __new__(  # type: ignore[overload-cannot-match]
            cls,
            inner_optimizer: Any,
            dynamic: bool = True,
            initial_scale: float | None = None,
            dynamic_growth_steps: int | None = None,
            *,
            rule: ScaleRule | None = None,
            name: str | None = None,
        ) -> Self: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls._framework is None:
            wrapped = args[0] if args else kwargs.get("inner_optimizer", kwargs.get("optimizer"))
            wrapper = registry.wrapper_for(wrapped)
            cls = wrapper if cls is LossScaleOptimizer else registry.combined(cls, wrapper)
        made: Self = super().__new__(cls)
        return made

    if not TYPE_CHECKING:
        __new__.__signature__ = inspect.signature(_constructed)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """Creates an optimizer from its configuration, with no saved state.

        Args:
            config: A dictionary from `get_config`; it is not changed.
            custom_objects: Classes that the configuration names and the framework does not
                know, by class name.

        Returns:
            An optimizer instance.

        Raises:
            ValueError: If it is not the configuration of a loss scale optimizer.

        Examples:
            >>> import keras, lossscale
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> lossscale.LossScaleOptimizer.from_config(optimizer.get_config()).initial_scale
            8.0
        """
        wrapper = cls if cls._framework else registry.default_wrapper(config)
        return cls._from_config(wrapper, config, custom_objects)

    @classmethod
    def _from_config(
        cls, wrapper: Any, config: dict[str, Any], custom_objects: dict[str, Any] | None
    ) -> LossScaleOptimizer:
        """Creates an optimizer with the inner optimizer that this wrapper makes."""
        check_config(config)
        rules = wrapper._with_class_named(config.get("rule"), custom_objects)
        inner, arguments = arguments_from_config(config, rules)
        inner = wrapper._inner_from_config(inner, custom_objects)
        made: LossScaleOptimizer = cls(inner, **arguments)
        return made

    def __dir__(self) -> list[str]:
        hidden = self._hidden | hides_what_only_raises(type(self))
        return [name for name in super().__dir__() if name not in hidden]

    def __repr__(self) -> str:
        names = [type(each).__name__ for each in (self, self.inner_optimizer, self._rule)]
        return "<{} around {}, {}{}>".format(*names, self._now())

    def _now(self) -> str:
        """What a reader sees of the state, where it can be read."""
        try:
            scale, skipped = float(self._scale_now()), int(self.steps_skipped)
            return f": loss scale {scale:g}, {skipped} of {int(self.iterations)} steps skipped"
        except Exception:
            # In a function that is being traced, or a graph of TensorFlow 1.
            return ""

    def _scale_now(self) -> Any:
        return self.loss_scale

    @property
    def rule(self) -> ScaleRule:
        """The rule that moves the loss scale."""
        return self._rule

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale moves by itself."""
        return bool(self._rule.moves)

    @property
    def initial_scale(self) -> float:
        """The first loss scale, or the fixed one; a dimensionless Python float."""
        return float(self._rule.init().scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """How many finite steps in a row raise the scale, in steps; None if it is fixed."""
        return growth_steps(self._rule)


if TYPE_CHECKING:

    class AroundTorch(LossScaleOptimizer, torch.optim.Optimizer):
        """What a type checker knows of one around an optimizer of PyTorch."""

        def scale_loss(self, loss: Any) -> torch.Tensor: ...
        @property
        def loss_scale(self) -> torch.Tensor: ...
        @property
        def steps_skipped(self) -> torch.Tensor: ...
        @property
        def last_step_skipped(self) -> torch.Tensor: ...

    class AroundKeras(LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        """What a type checker knows of one around an optimizer of Keras 3."""

"""The operations that loss scaling needs from a backend of Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from lossscale.common.autograph import do_not_convert
from lossscale.common.checks import flat_list
from lossscale.errors import ArgumentError
from lossscale.keras_common.scaled_gradients import Location
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import GradientStats, ScaleRule, ScaleState


class Step(NamedTuple):
    """The gradients of a step.

    Attributes:
        gradients: Those of this replica; None where there is none.
        variables: Their variables.
        divisor: What they still have to be divided by, a float32 scalar tensor or a number; None
            if they are unscaled.
    """

    gradients: list[Any]
    variables: list[Any]
    divisor: Any

    def scaled_by_loss(self) -> list[Any]:
        """The gradients that the loss scale multiplied, None for others."""
        return scaled_by_loss(self.gradients, self.variables)


class OverflowCheck(NamedTuple):
    """The result of checking the gradients of a step.

    Attributes:
        all_finite: Whether all are once they are unscaled: a boolean scalar tensor, or a bool where
            the host knows; True if nobody looked.
        step: The step; unscaled, where that was done on the way.
        state_on_host: The rule's state before the step as Python numbers, where the host has read
            it.
    """

    all_finite: Any
    step: Step
    state_on_host: ScaleState | None = None


class Backend:
    """A backend of Keras; the defaults are those of a single device.

    The attributes that each backend must define are declared first.
    """

    # The array functions for `ScaleRule.update`, and the function that measures gradients.
    namespace: Any
    gradient_stats: Callable[..., GradientStats]

    # Applies gradients or skips, then updates the loss scale. Takes
    #   stats: what the rule sees;
    #   step, inner: the step and the inner optimizer;
    #   apply: divides a list of gradients by a divisor and applies it;
    #   update_scale: updates the loss scale and the counters, given what the rule sees.
    apply_or_skip: Callable[..., None]

    # Multiplies a loss by the scale, in float32 or wider.
    scaled: Callable[[Any, Any], Any]
    # Divides gradients by the scale, in float32 or wider; sparse stays sparse. The last argument
    # says whether the scale is a power of two.
    unscaled: Callable[[Sequence[Any], Any, bool], list[Any]]
    # Returns whether gradients are finite when they are unscaled, a boolean scalar tensor. Takes
    # the same arguments; without a scale they are unscaled already.
    all_finite: Callable[..., Any]
    # Returns a gradient, dense or sparse, in another dtype.
    cast: Callable[[Any, str], Any]
    # Returns the current value of a Keras variable, a tensor that does not change with it.
    read: Callable[[Any], Any]

    # Returns the gradients of a scaled loss, and the variables they belong to. Takes
    #   loss: a callable without arguments, or a tensor that knows how it was computed;
    #   variables: a list, one variable, or a callable that returns either; with a tape None
    #       stands for the trainable variables that it watched;
    #   scale: multiplies a loss by the loss scale;
    #   tape: a `tf.GradientTape`, or None;
    #   grad_loss: tensor of the loss's shape that multiplies the gradients, or None.
    differentiate: Callable[..., tuple[list[Any], list[Any]]]
    # Returns the gradients of a tensor of the function that is being traced, by variables.
    symbolic_gradients: Callable[[Any, Sequence[Any]], list[Any]]

    # --- One step, in this order --------------------------------------------------------------

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which no gradient is recorded."""
        return contextlib.nullcontext()

    def check_context(self) -> None:
        """Raises an error if no step can be taken here."""

    def runs_now(self, gradients: Sequence[Any]) -> bool:
        """Whether the host sees the result of a step while it is taken."""
        return True

    def check(
        self, step: Step, rule: ScaleRule, inner: Any, scale_variables: ScaleVariables
    ) -> OverflowCheck:
        """Checks whether the gradients of a step are finite when they are unscaled.

        Args:
            step: The step of this replica.
            rule: What says whether anybody looks, and whether the divisor is a power of two.
            inner: The inner optimizer.
            scale_variables: The rule's state.
        """
        if not rule.checks_gradients:
            finite: Any = True
        elif step.divisor is None:
            finite = self.all_finite(step.gradients)
        else:
            scaled = step.scaled_by_loss()
            finite = self.all_finite(scaled, step.divisor, rule.powers_of_two)
            others = [
                gradient
                for gradient, multiplied in zip(step.gradients, scaled, strict=True)
                if multiplied is None and gradient is not None
            ]
            if others:
                finite = keras.ops.logical_and(finite, self.all_finite(others))
        return OverflowCheck(finite, step)

    def all_replicas_finite(self, finite: Any) -> Any:
        """Whether the gradients are finite on every replica."""
        return finite

    def apply(self, inner: Any, step: Step, rule: ScaleRule, *, aggregate: bool) -> None:
        """Unscales the gradients of a step, and has the inner optimizer apply them.

        Args:
            inner: The inner optimizer.
            step: The step.
            rule: What says whether the divisor is a power of two.
            aggregate: Whether the inner optimizer sums the gradients of the replicas.
        """
        gradients = self.unscale(step, rule)
        parts = (inner, *getattr(inner, "optimizers", ()))
        if any(part.gradient_accumulation_steps for part in parts):
            # Keras adds them to sums of the variables' dtype, and does not add two dtypes.
            dtype_of = keras.backend.standardize_dtype
            gradients = [
                gradient
                if gradient is None or dtype_of(gradient.dtype) == dtype_of(variable.dtype)
                else self.cast(gradient, dtype_of(variable.dtype))
                for gradient, variable in zip(gradients, step.variables, strict=True)
            ]
        self.apply_inner(inner, gradients, step.variables, aggregate=aggregate)

    def unscale(self, step: Step, rule: ScaleRule) -> list[Any]:
        """Returns the gradients of a step, divided by the loss scale if they are scaled."""
        if step.divisor is None:
            return step.gradients
        scaled = step.scaled_by_loss()
        unscaled = self.unscaled(scaled, step.divisor, rule.powers_of_two)
        return where_scaled(scaled, unscaled, step.gradients)

    def apply_inner(
        self, inner: Any, gradients: list[Any], variables: list[Any], *, aggregate: bool
    ) -> None:
        """Calls the inner optimizer."""
        inner.apply(gradients, variables)

    def update_on_host(
        self, optimizer: Any, stats: GradientStats, state_on_host: ScaleState | None
    ) -> bool:
        """Updates the loss scale and the counters of an optimizer with Python numbers.

        Args:
            optimizer: The loss scale optimizer.
            stats: What the rule sees.
            state_on_host: That of `OverflowCheck`.

        Returns:
            Whether it did; if not, the optimizer updates them with tensors.
        """
        return False

    def step_number(self, iterations: Any) -> Any:
        """The number of the current step, counted from 1; None if no tracker needs it."""
        return self.read(iterations) + 1

    # Runs the training step of a guarded model, and puts weights back if it was skipped. Takes
    #   model, step, args: the model, its step, and the arguments of the step;
    #   optimizers: the loss scale optimizers whose skips count;
    #   weights_of: returns the weights of the model to put back.
    # Returns what the step does.
    run_guarded: Callable[..., Any]

    # --- Where calls are made -----------------------------------------------------------------

    def check_strategy(self) -> None:
        """Raises an error under a distribution that loss scaling does not support."""

    def current_location(self) -> Location:
        """The function being traced, or None, and the numbers of the replicas."""
        return None, (0,)

    def replica_count(self) -> int:
        """The number of replicas."""
        return 1

    def eager_scope(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which variables are set immediately, even if a function is being traced."""
        return contextlib.nullcontext()

    # --- Variables ----------------------------------------------------------------------------

    def is_variable(self, value: Any) -> bool:
        """Whether a value is a variable."""
        return isinstance(value, keras.Variable)

    def flat_variables(self, variables: Any) -> list[Any]:
        """Returns a list of variables from one variable or a nest of them."""
        return flat_list(variables, keras.tree.flatten, self.is_variable)

    def prepare_own_variable(self, variable: Any) -> None:
        """Called with each new variable of a loss scale optimizer."""

    # --- Arrays -------------------------------------------------------------------------------

    def flat_gradients(self, gradients: Any) -> list[Any]:
        """The gradients in a nest, without None."""
        return [gradient for gradient in keras.tree.flatten(gradients) if gradient is not None]


def check_without_tape(backend: str, variables: Any, tape: Any) -> None:
    """Checks what is differentiated on a backend that does not record operations on a tape.

    Raises:
        ArgumentError: If there is a tape, or no variables are given.
    """
    if tape is not None:
        raise ArgumentError("`tape` is for the TensorFlow backend. Leave it out.")
    if variables is None:
        raise ArgumentError(
            f"`var_list` must be given on the {backend} backend. It does not record the variables "
            "a loss was computed from. Pass model.trainable_variables."
        )


@do_not_convert
def scaled_by_loss(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients that the loss scale multiplied, None for others.

    A variable that Keras overwrites with its gradient (float8 statistics) has no gradient of the
    loss, so nothing multiplied it.
    """
    return [
        None if getattr(variable, "overwrite_with_gradient", False) else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def where_scaled(
    scaled: Sequence[Any], unscaled: Sequence[Any], gradients: Sequence[Any]
) -> list[Any]:
    """Joins the unscaled gradients and those that the loss scale did not multiply."""
    return [
        gradient if multiplied is None else divided
        for multiplied, divided, gradient in zip(scaled, unscaled, gradients, strict=True)
    ]

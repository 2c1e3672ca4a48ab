"""The gradients of a step of Keras 3 or tf_keras, and the operations that it needs.

The step itself is in `optimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import lossscale.framework_types as ft
from lossscale.common.private_names import do_not_convert
from lossscale.keras_common.scaled_gradients import Location
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import ScaleRule, ScaleState


class Step(NamedTuple):
    """The gradients of a step.

    Attributes:
        gradients: Those of this replica; None where there is none.
        variables: Their variables.
        scale: Multiplies them: a float32 scalar tensor or a Python number; None if they are
            unscaled.
        aggregate: Whether the gradients of the replicas are summed.
        name: Name of the operations, or None.
    """

    gradients: list[ft.Gradient]
    variables: list[ft.Variable]
    scale: ft.Scalar | None = None
    aggregate: bool = True
    name: str | None = None

    @do_not_convert
    def without_overwritten(self) -> list[ft.Gradient]:
        """Returns the gradients that the loss scale multiplied, None for others.

        A variable that Keras overwrites with its gradient (float8 statistics) has no gradient of
        the loss, so nothing multiplied it.
        """
        return [
            None if getattr(variable, "overwrite_with_gradient", False) else gradient
            for gradient, variable in zip(self.gradients, self.variables, strict=True)
        ]

    def with_overwritten(self, scaled: ft.Gradients, unscaled: ft.Gradients) -> list[ft.Gradient]:
        """Joins the unscaled gradients and those that the loss scale did not multiply."""
        return [
            gradient if multiplied is None else divided
            for multiplied, divided, gradient in zip(scaled, unscaled, self.gradients, strict=True)
        ]


class OverflowCheck(NamedTuple):
    """The result of checking the gradients of a step.

    Attributes:
        all_finite: Whether all are once they are unscaled: a boolean scalar tensor, or a bool where
            the host knows; True if nobody looked.
        step: The step; unscaled, where that was done on the way.
        state_on_host: The rule's state before the step as Python numbers, where the host has read
            it.
    """

    all_finite: ft.Scalar
    step: Step
    state_on_host: ScaleState | None = None


class StepOperations:
    """The operations of a step on arrays; the defaults are those of a single device.

    The attributes that each framework must define are declared first.
    """

    # Applies gradients or skips, then updates the loss scale. Takes
    #   optimizer: the loss scale optimizer;
    #   finite: whether the gradients are finite on all replicas;
    #   step: the step;
    #   apply: divides a list of gradients by the scale and applies it;
    #   update_scale: updates the loss scale and the counters, given `finite`.
    # Returns the operation that does it in a graph of TensorFlow.
    apply_or_skip: Callable[..., ft.Operation]
    # Runs a step of guarded models, and puts weights back if it was skipped. Takes
    #   models, step, args: the models, their step, and the arguments of the step;
    #   optimizers: the loss scale optimizers whose skips count;
    #   weights: the weights of the models to put back.
    # Returns what the step returns.
    run_guarded: Callable[..., ft.Structure]
    # Makes the weights of a model as a call with these inputs would.
    trace_call: Callable[[ft.Model, ft.Structure], None]

    # Multiplies a loss by the scale, in float32 or wider.
    scaled: Callable[[ft.Array, ft.Scalar], ft.Tensor]
    # Divides gradients by the scale, in float32 or wider; sparse stays sparse. The last argument
    # says whether the scale is a power of two.
    unscaled: Callable[[ft.Gradients, ft.Scalar, bool], ft.Gradients]
    # Returns whether gradients are finite when they are unscaled, a boolean scalar tensor. Takes
    # the same arguments; without a scale they are unscaled already.
    all_finite: Callable[..., ft.Scalar]
    # Returns the current value of a variable, a tensor that does not change with it.
    read: Callable[[ft.Variable], ft.Tensor]
    # Whether a variable is in the memory of the host, so that nothing waits to read it.
    is_on_host: Callable[[ft.Variable], bool]
    # Returns the gradients in a nest, without None.
    flat_gradients: Callable[[ft.Structure], list[ft.Gradient]]
    # Whether a value is a variable; a list of variables from one variable or a nest of them.
    is_variable: Callable[[object], bool]
    flat_variables: Callable[[ft.Structure], list[ft.Variable]]
    # Returns the `OverflowTracker` of the framework.
    new_overflow_tracker: Callable[[], Any]

    # Whether the gradients of the replicas are summed before the check, or in the inner optimizer.
    sums_before_check = False

    def current_location(self) -> Location:
        """The function being traced, or None, and the numbers of the replicas."""
        return None, (0,)

    def replica_count(self) -> int:
        """The number of replicas."""
        return 1

    def eager_scope(self) -> contextlib.AbstractContextManager[object]:
        """A context in which variables are set immediately, even if a function is being traced."""
        return contextlib.nullcontext()

    def check_context(self) -> None:
        """Raises an error if no step can be taken here."""

    def no_gradients(self) -> contextlib.AbstractContextManager[object]:
        """A context in which no gradient is recorded."""
        return contextlib.nullcontext()

    def runs_now(self, gradients: ft.Gradients) -> bool:
        """Whether the host sees the result of a step while it is taken."""
        return True

    def check(
        self, step: Step, rule: ScaleRule, inner: ft.KerasOptimizer, scale_variables: ScaleVariables
    ) -> OverflowCheck:
        """Checks whether the gradients of a step are finite when they are unscaled.

        Args:
            step: The step of this replica.
            rule: What says whether anybody looks, and whether the scale is a power of two.
            inner: The inner optimizer.
            scale_variables: The rule's state.
        """
        if not rule.checks_gradients:
            finite: ft.Scalar = True
        elif step.scale is None:
            finite = self.all_finite(step.gradients)
        else:
            scaled = step.without_overwritten()
            finite = self.all_finite(scaled, step.scale, rule.powers_of_two)
            others = [
                gradient
                for gradient, multiplied in zip(step.gradients, scaled, strict=True)
                if multiplied is None and gradient is not None
            ]
            if others:
                finite = finite & self.all_finite(others)
        return OverflowCheck(finite, step)

    def all_replicas_finite(self, finite: ft.Scalar) -> ft.Scalar:
        """Whether the gradients are finite on every replica."""
        return finite

    def unscale(self, step: Step, rule: ScaleRule) -> list[ft.Gradient]:
        """Returns the gradients of a step, divided by the loss scale if they are scaled."""
        if step.scale is None:
            return step.gradients
        scaled = step.without_overwritten()
        unscaled = self.unscaled(scaled, step.scale, rule.powers_of_two)
        return step.with_overwritten(scaled, unscaled)

    def step_number(self, iterations: ft.Variable) -> ft.Scalar | None:
        """The number of the current step, counted from 1; None if no tracker needs it."""
        return self.read(iterations) + 1

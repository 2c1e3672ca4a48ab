"""One step of a loss scale optimizer of Keras 3 or tf_keras: `take_step`, from top to bottom.

The optimizer and its `_backend` define the methods that differ between the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lossscale.common.checks import warned_at_floor
from lossscale.common.private_names import do_not_convert
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import GradientStats, ScaleRule, ScaleState, StatsRequest


class Step(NamedTuple):
    """The gradients of a step.

    Attributes:
        gradients: Those of this replica; None where there is none.
        variables: Their variables.
        divisor: The number to divide them by, a float32 scalar tensor or a Python number; None
            if they are unscaled.
        aggregate: Whether the gradients of the replicas are summed.
        name: Name of the operations, or None.
    """

    gradients: list[Any]
    variables: list[Any]
    divisor: Any
    aggregate: bool
    name: str | None

    def without_overwritten(self) -> list[Any]:
        """The gradients that the loss scale multiplied, None for others."""
        return without_overwritten(self.gradients, self.variables)


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


def take_step(
    self: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    scaled: bool,
    aggregate: bool = True,
    name: str | None = None,
) -> Any:
    """Takes a step: checks the gradients, applies them or skips, updates the loss scale.

    Args:
        self: The loss scale optimizer.
        gradients: Those of this replica; None where there is none.
        variables: Their variables.
        scaled: Whether the gradients are those of the scaled loss.
        aggregate: Whether the gradients of the replicas are summed.
        name: Name of the operations, or None.
    """
    backend, rule, state, tracker = self._backend, self._rule, self._state, self._overflow_tracker
    if scaled and (state.decide is not None or self._is_overridden("get_unscaled_gradients")):
        # Code of the user's unscales them, or decides by unscaled ones.
        with self._ledger.own_step(backend.current_location()):
            gradients, scaled = self._unscaled_by_verb(gradients, variables), False
    with self._name_scope(name), backend.no_gradients():
        gradients, variables = self._prepared(gradients, variables, aggregate)
        needs_stats = rule.needs != StatsRequest()
        warns_at_min_scale = self._may_warn_at_floor() and backend.runs_now(gradients)
        needs_scale = scaled or needs_stats or warns_at_min_scale or tracker is not None
        scale: Any = self._current_scale() if needs_scale else None
        divisor = scale if scaled else None
        step = Step(list(gradients), list(variables), divisor, aggregate, name)

        if state.decide is not None:
            check = OverflowCheck(state.decide(step.gradients), step)
        else:
            check = backend.check(step, rule, self.inner_optimizer, state)
        step, finite = check.step, backend.all_replicas_finite(check.all_finite)
        stats = backend.stats(step, rule, finite, scale) if needs_stats else GradientStats(finite)
        if tracker is not None:
            tracker.track(
                gradients=step.gradients,
                variables=step.variables,
                unscale=lambda each: backend.unscale(step._replace(gradients=list(each)), rule),
                finite=finite,
                scale=scale,
                number=backend.step_number(self.iterations),
                is_shared=backend.sums_before_check or not aggregate,
            )

        def apply(gradients: Sequence[Any], divisor: Any) -> Any:
            # Each replica has its own gradients and divisor.
            return self._apply(step._replace(gradients=list(gradients), divisor=divisor))

        def update_scale(stats: GradientStats) -> Any:
            return self._update_scale(stats, check.state_on_host)

        done = self._apply_or_skip(stats, step, apply, update_scale)
    if warns_at_min_scale and not finite:
        self._warned_at_floor = warned_at_floor(rule, float(scale))
    return self._result(done)


class StepOperations:
    """The operations of a step on arrays; the defaults are those of a single device."""

    # Divides gradients by the scale, in float32 or wider; sparse stays sparse. The last argument
    # says whether the scale is a power of two.
    unscaled: Callable[[Sequence[Any], Any, bool], list[Any]]
    # Returns whether gradients are finite when they are unscaled, a boolean scalar tensor. Takes
    # the same arguments; without a scale they are unscaled already.
    all_finite: Callable[..., Any]
    # Returns the current value of a variable, a tensor that does not change with it.
    read: Callable[[Any], Any]
    # Whether a variable is in the memory of the host, so that nothing waits to read it.
    is_on_host: Callable[[Any], bool]
    # Measures gradients.
    gradient_stats: Callable[..., GradientStats]

    # Whether the gradients of the replicas are summed before the check, or in the inner optimizer.
    sums_before_check = False

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which no gradient is recorded."""
        return contextlib.nullcontext()

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
            scaled = step.without_overwritten()
            finite = self.all_finite(scaled, step.divisor, rule.powers_of_two)
            others = [
                gradient
                for gradient, multiplied in zip(step.gradients, scaled, strict=True)
                if multiplied is None and gradient is not None
            ]
            if others:
                finite = finite & self.all_finite(others)
        return OverflowCheck(finite, step)

    def all_replicas_finite(self, finite: Any) -> Any:
        """Whether the gradients are finite on every replica."""
        return finite

    def stats(self, step: Step, rule: ScaleRule, finite: Any, scale: Any) -> GradientStats:
        """The statistics of the gradients that the rule needs."""
        are_scaled = step.divisor is not None
        gradients = step.without_overwritten()
        return self.gradient_stats(rule.needs, finite, gradients, scale, are_scaled=are_scaled)

    def unscale(self, step: Step, rule: ScaleRule) -> list[Any]:
        """Returns the gradients of a step, divided by the loss scale if they are scaled."""
        if step.divisor is None:
            return step.gradients
        scaled = step.without_overwritten()
        unscaled = self.unscaled(scaled, step.divisor, rule.powers_of_two)
        return with_overwritten(scaled, unscaled, step.gradients)

    def step_number(self, iterations: Any) -> Any:
        """The number of the current step, counted from 1; None if no tracker needs it."""
        return self.read(iterations) + 1


@do_not_convert
def without_overwritten(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients that the loss scale multiplied, None for others.

    A variable that Keras overwrites with its gradient (float8 statistics) has no gradient of the
    loss, so nothing multiplied it.
    """
    return [
        None if getattr(variable, "overwrite_with_gradient", False) else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def with_overwritten(
    scaled: Sequence[Any], unscaled: Sequence[Any], gradients: Sequence[Any]
) -> list[Any]:
    """Joins the unscaled gradients and those that the loss scale did not multiply."""
    return [
        gradient if multiplied is None else divided
        for multiplied, divided, gradient in zip(scaled, unscaled, gradients, strict=True)
    ]

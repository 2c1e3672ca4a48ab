"""A step of Keras 3 and of tf_keras: check the gradients, apply them or skip, update the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lossscale.framework_types as ft
from lossscale.common.arrays import Arrays
from lossscale.common.private_names import do_not_convert
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import ScaleRule


class Step(NamedTuple):
    """The gradients of a step.

    Attributes:
        gradients: Those of this replica; None where there is none.
        variables: Their variables.
        scale: Multiplies them: a float32 scalar tensor or a Python number; None if they are
            unscaled.
        aggregate: Whether the gradients of the replicas are still to be summed.
        name: Name of the operations, or None.
    """

    gradients: list[ft.Gradient]
    variables: list[ft.Variable]
    scale: ft.Scalar | None = None
    aggregate: bool = True
    name: str | None = None


class Parts(NamedTuple):
    """What an optimizer's steps work with.

    Attributes:
        arrays: The functions of its framework.
        inner: The inner optimizer.
        state: The rule and its state.
        steps: The number of steps, an integer scalar variable.
        steps_skipped: The number of skipped ones, an integer scalar variable.
        last_step_skipped: Whether the last step was skipped, a boolean scalar variable.
        apply: Has the inner optimizer apply the unscaled gradients of a step.
        written: Returns the variables that it may change in a step.
        warn: Takes the scale of a skipped step, to warn at the minimum; None if that is not needed.
        tracker: The `OverflowTracker` of a monitor, or None.
    """

    arrays: Arrays
    inner: ft.KerasOptimizer
    state: ScaleVariables
    steps: ft.Variable
    steps_skipped: ft.Variable
    last_step_skipped: ft.Variable
    apply: Callable[[Step], object]
    written: Callable[[Step], list[ft.Variable]]
    warn: Callable[[float], None] | None
    tracker: Any


def take(step: Step, is_scaled: bool, parts: Parts) -> ft.Operation:
    """Takes a step: checks the gradients, applies them or skips, updates the loss scale.

    Args:
        step: The gradients, without the scale.
        is_scaled: Whether they are those of the scaled loss.
        parts: What the optimizer's steps work with.

    Returns:
        The operation that does it in a graph of TensorFlow.
    """
    arrays, state, tracker, rule = parts.arrays, parts.state, parts.tracker, parts.state.rule
    warn = parts.warn if parts.warn is not None and arrays.runs_now(step.gradients) else None
    is_scale_used = is_scaled or warn is not None or tracker is not None
    scale: ft.Scalar = state.scale() if is_scale_used else None
    step = step._replace(scale=scale if is_scaled else None)

    if state.decide is not None:
        finite = state.decide(step.gradients)
    else:
        finite, step = (arrays.check or check)(step, rule, arrays)
    finite = arrays.on_all_replicas(finite)

    def unscaled(gradients: ft.Gradients, scale: ft.Scalar | None) -> list[ft.Gradient]:
        # Each replica has its own gradients, and its own copy of the scale.
        return unscale(step._replace(gradients=list(gradients), scale=scale), rule, arrays)

    if tracker is not None:
        tracker.track(
            gradients=step.gradients,
            variables=step.variables,
            unscale=lambda gradients: unscaled(gradients, step.scale),
            finite=finite,
            scale=scale,
            number=None if tracker.counts_steps else arrays.read(parts.steps) + 1,
            is_shared=not step.aggregate,
        )

    def apply(gradients: ft.Gradients, scale: ft.Scalar | None) -> object:
        return parts.apply(step._replace(gradients=unscaled(gradients, scale), scale=None))

    def update(finite: ft.Scalar) -> list[ft.Operation]:
        return [state.update(finite), *_counted(finite, parts)]

    done = arrays.branch(finite, step, parts.inner, lambda: parts.written(step), apply, update)
    if warn is not None and not finite:
        warn(float(scale))
    return done


def check(step: Step, rule: ScaleRule, arrays: Arrays) -> tuple[ft.Scalar, Step]:
    """Returns whether the gradients of a step are finite when they are unscaled, and the step."""
    if not rule.checks_gradients:
        return True, step
    if step.scale is None:
        return arrays.all_finite(step.gradients), step
    scaled = without_overwritten(step)
    finite = arrays.all_finite(scaled, step.scale, rule.powers_of_two)
    pairs = zip(step.gradients, scaled, strict=True)
    if others := [each for each, multiplied in pairs if multiplied is None and each is not None]:
        finite = finite & arrays.all_finite(others)
    return finite, step


def unscale(step: Step, rule: ScaleRule, arrays: Arrays) -> list[ft.Gradient]:
    """Returns the gradients of a step, divided by the loss scale if they are scaled."""
    if step.scale is None:
        return step.gradients
    scaled = without_overwritten(step)
    return with_overwritten(step, scaled, arrays.unscaled(scaled, step.scale, rule.powers_of_two))


@do_not_convert
def without_overwritten(step: Step) -> list[ft.Gradient]:
    """Returns the gradients that the loss scale multiplied, None for others.

    A variable that Keras overwrites with its gradient (float8 statistics) has no gradient of the
    loss, so nothing multiplied it.
    """
    return [
        None if getattr(variable, "overwrite_with_gradient", False) else gradient
        for gradient, variable in zip(step.gradients, step.variables, strict=True)
    ]


def with_overwritten(step: Step, scaled: ft.Gradients, unscaled: ft.Gradients) -> list[ft.Gradient]:
    """Joins the unscaled gradients and those that the loss scale did not multiply."""
    return [
        gradient if multiplied is None else divided
        for multiplied, divided, gradient in zip(scaled, unscaled, step.gradients, strict=True)
    ]


def _counted(finite: ft.Scalar, parts: Parts) -> list[ft.Operation]:
    """Counts a step, if it can be skipped; returns what `assign` does."""
    arrays = parts.arrays
    if not parts.state.rule.checks_gradients:
        return []
    if arrays.host_reader() is not None:
        finite = bool(finite)
    skipped = not finite if isinstance(finite, bool) else ~finite
    done = [arrays.assign(parts.last_step_skipped, skipped)]
    return done if skipped is False else [*done, arrays.add(parts.steps_skipped, skipped)]

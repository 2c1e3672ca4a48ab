"""JAX: tracks overflows in a pure state, which a compiled step takes and returns.

`init` returns the first state and `update` the next one, inside a compiled function or outside;
`read` copies it to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.common import overflow_tracker
from lossscale.common.overflow_tracker import CheckedStep
from lossscale.jax.apply_or_skip import type_of
from lossscale.jax.gradients import in_groups, is_joined, is_traced, real_parts
from lossscale.monitoring.recorder import SkippedStep


class TrackedSteps(NamedTuple):
    """The tracked overflows: arrays, each with its own buffer.

    Attributes:
        last_scale: float32 scalar; the loss scale of the last step.
        skip_step: int32 scalar; the number of the last skipped step.
        skip_scale: float32 scalar; the loss scale of the last skipped step.
        nonfinite: uint32 of shape (variables, 2); the infinities and NaN in its gradients.
    """

    last_scale: jax.Array
    skip_step: jax.Array
    skip_scale: jax.Array
    nonfinite: jax.Array


def init(variables: int) -> TrackedSteps:
    """Returns the state before the first step: NumPy arrays of zeros.

    Args:
        variables: Number of variables.
    """
    return TrackedSteps(
        np.zeros((), np.float32),
        np.zeros((), np.int32),
        np.zeros((), np.float32),
        np.zeros((variables, 2), np.uint32),
    )


def update(
    state: TrackedSteps,
    gradients: Callable[[], Sequence[Any]],
    *,
    finite: Any,
    scale: Any,
    number: Any,
) -> TrackedSteps:
    """Returns the state after a step.

    Args:
        state: The state before the step.
        gradients: A function that returns the unscaled gradient of each row, or None; called only
            in the branches that need it.
        finite: Whether the step is applied: a boolean scalar array, or True without a check.
        scale: The loss scale of the step, float32 scalar array.
        number: The number of the step, counted from 1; integer scalar array.
    """
    last_scale, *kept = state
    last_scale = jnp.asarray(scale, jnp.asarray(last_scale).dtype)

    def of_this_step(counts: Callable[[Sequence[Any]], Any] = _nonfinite) -> list[Any]:
        new = (number, scale, counts(gradients()))
        return [
            jnp.asarray(each, jnp.asarray(old).dtype) for each, old in zip(new, kept, strict=True)
        ]

    def branched() -> list[Any]:
        return list(jax.lax.cond(finite, lambda: list(map(jnp.asarray, kept)), of_this_step))

    def selected() -> list[Any]:
        pairs = zip(of_this_step(_nonfinite_on_gpu), kept, strict=True)
        return [jnp.where(finite, jnp.asarray(old), new) for new, old in pairs]

    # `last_scale` stays outside, because what passes through a branch may be copied.
    if is_traced([finite]):
        # On a GPU the host would wait in each step to read which branch runs. On a CPU a select
        # would read the gradients once more in each step.
        kept = jax.lax.platform_dependent(default=branched, cuda=selected, rocm=selected)
    elif not bool(finite):
        kept = of_this_step()
    return TrackedSteps(last_scale, *kept)


def read(
    names: Sequence[str], state: TrackedSteps, after: int, until: int
) -> tuple[float, SkippedStep | None]:
    """Waits for the device; see `lossscale.common.overflow_tracker.OverflowTracker.read`.

    Args:
        names: The names of the variables.
        state: The state.
        after: The number of the step before the first one to report.
        until: The number of the last one to report.
    """
    skip = None
    if after < (step := int(state.skip_step)) <= until:
        tensors = overflow_tracker.nonfinite_tensors(names, np.asarray(state.nonfinite))
        skip = SkippedStep(step, float(state.skip_scale), tensors)
    return float(state.last_scale), skip


class OverflowTracker(overflow_tracker.OverflowTracker):
    """Tracks overflows in variables, which the trainer passes along with the optimizer's.

    Args:
        new_variable: Creates a variable of zeros from a name, a dtype and a shape.
    """

    def __init__(self, new_variable: Callable[[str, str, tuple[int, ...]], Any]) -> None:
        self._new_variable = new_variable

    def _create(self) -> None:
        self.variables = [
            self._new_variable(name, leaf.dtype.name, leaf.shape)
            for name, leaf in init(len(self.names))._asdict().items()
        ]

    def _track(self, step: CheckedStep) -> None:
        before = self._state()
        after = update(
            before,
            lambda: self._unscaled_by_row(step),
            finite=step.finite,
            scale=step.scale,
            number=step.number,
        )
        for variable, old, new in zip(self.variables, before, after, strict=True):
            if new is not old:
                variable.assign(new)

    def read(self, after: int, until: int) -> tuple[float, SkippedStep | None]:
        return read(self.names, self._state(), after, until)

    def _state(self) -> TrackedSteps:
        return TrackedSteps(*(variable.value for variable in self.variables))


def _nonfinite(gradients: Sequence[Any]) -> Any:
    """Returns the numbers of infinite elements and of NaN, uint32 of shape (gradients, 2)."""

    def of_one(gradient: Any) -> Any:
        counts = jnp.zeros(2, jnp.uint32)
        for part in real_parts(gradient):
            counts += jnp.stack([jnp.sum(test(part), dtype=jnp.uint32) for test in _TESTS])
        return counts

    return jnp.stack([of_one(gradient) for gradient in gradients])


def _nonfinite_on_gpu(gradients: Sequence[Any]) -> Any:
    """Returns the same; one kernel reads several gradients of one type."""
    alike: dict[Any, list[tuple[int, Any]]] = {}
    for row, gradient in enumerate(gradients):
        parts = real_parts(gradient) or [jnp.zeros(0)]
        array = parts[0] if len(parts) == 1 else jnp.stack(parts)
        key = type_of(array) if is_joined(array) else row
        alike.setdefault(key, []).append((row, array))
    rows, counts = [], []
    for group in in_groups(alike):
        rows += [row for row, _ in group]
        stacked = jnp.stack([array for _, array in group])
        axes = tuple(range(1, stacked.ndim))
        each = [jnp.sum(test(stacked), axes, dtype=jnp.uint32) for test in _TESTS]
        counts.append(jnp.stack(each, axis=1))
    return jnp.concatenate(counts)[np.argsort(rows)]


_TESTS = jnp.isinf, jnp.isnan

"""JAX: tracks overflows in a pure state, which a compiled step takes and returns.

`init` returns the first state and `update` the next one, inside a compiled function or outside;
`read` copies it to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lossscale.common import overflow_tracker
from lossscale.common.overflow_tracker import CheckedStep
from lossscale.framework_types import Variable
from lossscale.jax.apply_or_skip import varying_axes
from lossscale.jax.gradients import (
    Gradient,
    in_groups,
    is_traced,
    may_be_divided,
    nonfinite_by_row,
    real_parts,
)
from lossscale.monitoring.recorder import SkippedStep


class TrackedSteps(NamedTuple):
    """The tracked overflows: arrays, each with its own buffer.

    Attributes:
        scales: float32 of shape (2,); the loss scale of the last step, and that of the last skipped
            one.
        skip_step: int32 scalar; the number of the last skipped step.
        nonfinite: uint32 of shape (variables, 2); the infinities and NaN in its gradients.
    """

    scales: Array
    skip_step: Array
    nonfinite: Array


def init(variables: int) -> TrackedSteps:
    """Returns the state before the first step: NumPy arrays of zeros.

    Args:
        variables: Number of variables.
    """
    # JAX takes these where it takes its own, and puts them on no device before.
    zeros = np.zeros(2, np.float32), np.zeros((), np.int32), np.zeros((variables, 2), np.uint32)
    return TrackedSteps(*zeros)  # type: ignore[arg-type]  # NumPy's, as the comment says


def update(
    state: TrackedSteps,
    gradients: Callable[[], Sequence[Gradient]],
    *,
    finite: Array | bool,
    scale: Array | float,
    number: Array | int,
    axis_names: Sequence[str] = (),
) -> TrackedSteps:
    """Returns the state after a step.

    Args:
        state: The state before the step.
        gradients: A function that returns the unscaled gradient of each row, or None; called only
            in the branches that need it.
        finite: Whether the step is applied: a boolean scalar array, or True without a check.
        scale: The loss scale of the step, float32 scalar array.
        number: The number of the step, counted from 1; integer scalar array.
        axis_names: Names of axes along which gradients differ, over which counts are added.
    """
    scales, *kept = map(jnp.asarray, state)
    scales = jnp.where(finite & jnp.array([False, True]), scales, jnp.asarray(scale, scales.dtype))

    def of_this_step() -> list[Array]:
        given = gradients()
        counts = _nonfinite(given)
        new = (number, _added(counts, given, axis_names) if axis_names else counts)
        return [jnp.asarray(each, old.dtype) for each, old in zip(new, kept, strict=True)]

    def branched() -> list[Array]:
        # Selected there too: JAX then knows along which axes both results vary.
        return list(jax.lax.cond(finite, lambda: kept, selected))

    def selected() -> list[Array]:
        pairs = zip(of_this_step(), kept, strict=True)
        return [jnp.where(finite, old, new) for new, old in pairs]

    if is_traced([finite]):
        # On a GPU the host would wait in each step to read which branch runs. On a CPU a select
        # would read the gradients once more in each step.
        kept = jax.lax.platform_dependent(default=branched, cuda=selected, rocm=selected)
    elif not bool(finite):
        kept = of_this_step()
    return TrackedSteps(scales, *kept)


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
    scale, scale_of_skip = map(float, np.asarray(state.scales))
    skip = None
    if after < (step := int(state.skip_step)) <= until:
        tensors = overflow_tracker.nonfinite_tensors(names, np.asarray(state.nonfinite))
        skip = SkippedStep(step, scale_of_skip, tensors)
    return scale, skip


class OverflowTracker(overflow_tracker.OverflowTracker):
    """Tracks overflows in variables, which the trainer passes along with the optimizer's.

    Args:
        new_variable: Creates a variable of zeros from a name, a dtype and a shape.
    """

    def __init__(self, new_variable: Callable[[str, str, tuple[int, ...]], Variable]) -> None:
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


def _nonfinite(gradients: Sequence[Gradient]) -> Array:
    """Returns the numbers of infinite elements and of NaN, uint32 of shape (gradients, 2)."""
    pairs = [(row, part) for row, each in enumerate(gradients) for part in real_parts(each)]
    groups = [[pairs[place] for place in places] for places in in_groups([p for _, p in pairs])]
    rows = [row for group in groups for row, _ in group]
    counts = [_counts([part for _, part in group]) for group in groups]
    if rows == list(range(len(gradients))):
        return jnp.concatenate(counts)
    empty = jnp.zeros((len(gradients), 2), jnp.uint32)
    return empty.at[np.array(rows)].add(jnp.concatenate(counts)) if rows else empty


def _added(counts: Array, gradients: Sequence[Gradient], axis_names: Sequence[str]) -> Array:
    """The sums over all devices; a gradient that is known to be the same on them counts once."""
    vary = [frozenset().union(*map(varying_axes, real_parts(each))) for each in gradients]
    for name in axis_names:
        index = jax.lax.axis_index(name)
        # In `pmap`, and without the check of `shard_map`, JAX knows nothing.
        same = np.array([name in varying_axes(index) - each for each in vary])
        counts = jnp.where(same[:, None] & (index > 0), 0, counts)
    added: Array = jax.lax.psum(counts, tuple(axis_names))
    return added


def _counts(arrays: Sequence[Array]) -> Array:
    """Returns the same for arrays that a GPU reads together, which are real."""
    if may_be_divided(arrays[0]):
        stacked = jnp.stack(arrays)
        axes = tuple(range(1, stacked.ndim))
        each = [jnp.sum(test(stacked), axes, dtype=jnp.uint32) for test in _TESTS]
        return jnp.stack(each, axis=1)
    packed, rows = nonfinite_by_row(arrays)
    both = jnp.stack([packed & 0xFFFF, packed >> 16])
    numbers = np.array(rows, np.int32)[:, None, None]
    ends = np.cumsum(numbers, axis=0, dtype=np.int32)
    row = jax.lax.iota(jnp.int32, packed.size)
    return jnp.sum(jnp.where((row >= ends - numbers) & (row < ends), both, 0), axis=2)


_TESTS = jnp.isinf, jnp.isnan

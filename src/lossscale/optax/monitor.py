"""The monitor of a training loop that uses Optax."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from lossscale.checks import checked_count
from lossscale.common.overflow_tracker import unique_names
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax import overflow_tracker
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.jax.overflow_tracker import TrackedSteps
from lossscale.monitoring.loop import LoopMonitor
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import MonitorSettings, Recorder, StepStats
from lossscale.optax.gating import owner_of
from lossscale.optax.overflow_tracking import named_leaves
from lossscale.optax.scale_state import array_in
from lossscale.optax.state_lookup import state_in
from lossscale.rules import ScaleRule


class _Watched(NamedTuple):
    """The arrays of a state that are read on a sampled step.

    Attributes:
        iterations, tracked: The number of steps, and the tracked overflows.
        scale, steps_skipped, consecutive_skips: Fields of the state of `loss_scaled`.
    """

    iterations: Array
    tracked: TrackedSteps
    scale: Array
    steps_skipped: Array
    consecutive_skips: Array


class Monitor(LoopMonitor):
    """Records what the loss scale does in a training loop, and warns when something is wrong.

    Call `step` after each training step, outside of compiled functions, and `close` at the end; or
    use it in a `with`. On sampled steps it waits for the device, and reads the loss scale and, if
    the step was skipped, why, and which gradients had infinities or NaN. On other steps it reads
    nothing, and the last skipped step between two samples is recorded too.

    Args:
        tx: The result of `loss_scaled(..., track_overflows=True)`, or the rule of the loss scale.
        params: The parameters, or a tree of the same structure, for the names of gradients.
        opt_state: The state before the first monitored step, or an object that holds it as
            `opt_state`, such as a `TrainState`.
        path: A new file for the records, JSON lines. None writes no file.
        every: Sample each step whose number is a multiple of this, and the first and the last one.
            Skipped steps in between are counted.
        log: Called with each record as a dictionary, `lossscale.monitoring.StepRecord.to_dict`,
            after it is written. Its exceptions leave `step` and `close`.

    Raises:
        ArgumentError: If an argument is invalid; the message names it.
        ArgumentTypeError: If an argument has the wrong type.
        OSError: If the file cannot be written.

    Examples:
        >>> params = {"w": jnp.ones(2)}
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5), initial_scale=8, track_overflows=True)
        >>> opt_state = tx.init(params)
        >>> with lossscale.optax.Monitor(tx, params, opt_state) as monitor:
        ...     grads = {"w": jnp.float32([1.0, jnp.inf])}
        ...     _, opt_state = tx.update(grads, opt_state, params)
        ...     record = monitor.step(opt_state, loss=0.25)
        >>> record.scale, record.next_scale, str(record.reason), str(record.nonfinite[0])
        (8.0, 4.0, 'overflow', 'w (1 inf)')
    """

    def __init__(
        self,
        tx: optax.GradientTransformation | ScaleRule,
        params: optax.Params,
        opt_state: object,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        log: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        settings = MonitorSettings(path, every, log)
        rule = tx if isinstance(tx, ScaleRule) else getattr(owner_of(tx), "rule", None)
        if not isinstance(rule, ScaleRule):
            raise ArgumentTypeError(
                "`tx` must be what lossscale.optax.loss_scaled returned, or its "
                f"rule. Received: a {type(tx).__name__}."
            )
        self._names = unique_names([name for name, _ in named_leaves(params)])
        self._watched = self._arrays_of(opt_state)
        super().__init__(Recorder(settings, rule), _stats(self._watched).step)

    def step(
        self, opt_state: object, loss: Array | float | None = None, *, steps: int = 1
    ) -> StepRecord | None:
        """Records the training step if it is sampled. Call it after each step.

        Args:
            opt_state: The state that the step returned, or an object that has it as `opt_state`.
            loss: The unscaled loss of the step, a scalar. If it is None, the record of a skip
                cannot say whether the loss was finite.
            steps: Number of steps since the last call, for a compiled function that runs several;
                the last of these steps is read.

        Returns:
            The record of the step, the last one of several; None if it was not read.

        Raises:
            ArgumentError, ArgumentTypeError: If an argument is invalid, such as the state of the
                step before, or if the monitor is closed. Nothing is read.
        """
        self._check_open()
        checked_count("steps", steps)
        watched = self._arrays_of(opt_state)
        if watched.steps_skipped is self._watched.steps_skipped:
            raise ArgumentError(
                "`opt_state` is the state from before this step. Pass the state that tx.update "
                "returned."
            )

        def read(last_read: int) -> StepStats | None:
            if _any_deleted(watched):
                return None
            stats = _stats(watched)
            after = min(last_read, stats.step - 1)
            scale, skip = overflow_tracker.read(self._names, watched.tracked, after, stats.step)
            number = None if loss is None else float(loss)
            return stats._replace(scale=scale, last_skip=skip, loss=number)

        self._watched = watched
        return self._add_steps(steps, read)

    def _arrays_of(self, opt_state: ArrayTree) -> _Watched:
        """Returns the arrays to read, without reading them."""
        state = state_in(opt_state)
        if state.tracked is None:
            raise ArgumentError(
                "`opt_state` must track overflows. Write loss_scaled(..., track_overflows=True). "
                "Received: a state that tracks none."
            )
        tracked = TrackedSteps(*map(array_in, state.tracked.steps))
        if tracked.nonfinite.shape[0] != len(self._names):
            raise ArgumentError(
                "`params` must be the parameters that tx.init was called with. Received: "
                f"{len(self._names)} trainable arrays, for a state that tracks "
                f"{tracked.nonfinite.shape[0]}."
            )
        numbers = state.loss_scale, state.steps_skipped, state.consecutive_skips
        return _Watched(array_in(state.tracked.iterations), tracked, *map(array_in, numbers))


def _stats(watched: _Watched) -> StepStats:
    numbers = watched.iterations, watched.scale, watched.steps_skipped, watched.consecutive_skips
    step, scale, count, in_a_row = jax.device_get(numbers)
    return StepStats(int(step), float(scale), float(scale), int(count), bool(in_a_row > 0))


def _any_deleted(arrays: ArrayTree) -> bool:
    """Whether a later step has taken the buffer of an array."""
    leaves = jax.tree.leaves(arrays)
    return any(isinstance(leaf, Array) and leaf.is_deleted() for leaf in leaves)

"""The monitor of a training loop that uses Optax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.checks import checked_count
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.jax import notes
from lossscale.monitoring import monitor as core
from lossscale.monitoring.loop import LoopMonitor
from lossscale.monitoring.monitor import MonitorSettings, StepStats
from lossscale.optax.finding import state_in
from lossscale.optax.noting import NotedState, names_of
from lossscale.rules import ScaleRule


class _Shown(NamedTuple):
    """The arrays of a state that are read, if they are.

    Attributes:
        noted: Those that `noted` keeps: the number of steps, and what was noted; or None.
        scale, steps_skipped, last_step_skipped: Of the state of `loss_scaled`.
    """

    noted: tuple[Any, notes.NoteState] | None
    scale: Any
    steps_skipped: Any
    last_step_skipped: Any


class Monitor(LoopMonitor):
    """Records what the loss scale does in a loop of your own, and warns when something is wrong.

    Call `step` after each step, outside of compiled functions, and `close` at the end, or use it in
    a `with`. On sampled steps it waits for the device and reads the loss scale and, if the step was
    skipped, why. On others it reads nothing.

    An optimizer that is `noted` also says which gradients had infinities or NaN, when it was the
    last skip between two samples.

    Args:
        tx: What `loss_scaled` or `noted` returned; or the rule of it.
        params: The parameters, or a tree of the same form, for the names of gradients.
        opt_state: The state before the first step that is watched, or what holds it as
            `opt_state`, such as a `TrainState`.
        path: A file for the history, JSON lines; see `lossscale.monitoring.read_records`.
            None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to add to the file `path` if it exists, as a resumed run does.
        steps_before: How many steps the run has behind it. A state of `noted` knows it by itself.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.
        ArgumentTypeError: If one is of the wrong type. It is a `TypeError`.
        OSError: If the file cannot be written, or exists and `append` is False.

    Examples:
        >>> params = {"w": jnp.ones(2)}
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5), initial_scale=8)
        >>> tx = lossscale.optax.noted(tx)
        >>> opt_state = tx.init(params)
        >>> with lossscale.optax.Monitor(tx, params, opt_state) as monitor:
        ...     grads = {"w": jnp.float32([1.0, jnp.inf])}
        ...     _, opt_state = tx.update(grads, opt_state, params)
        ...     monitor.step(opt_state, loss=0.25)
        >>> record = monitor.last_record
        >>> record.scale, record.next_scale, str(record.reason), str(record.nonfinite[0])
        (8.0, 4.0, 'overflow', 'w (1 inf)')
    """

    def __init__(
        self,
        tx: Any,
        params: Any,
        opt_state: Any,
        path: Any = None,
        *,
        steps_before: int = 0,
        **settings: Any,
    ) -> None:
        owner = getattr(getattr(tx, "update", None), "__self__", tx)
        rule = tx if isinstance(tx, ScaleRule) else getattr(owner, "rule", None)
        if not isinstance(rule, ScaleRule):
            raise ArgumentTypeError(
                "`tx` must be what lossscale.optax.loss_scaled or noted returned, or the rule of "
                f"it. Received: a {type(tx).__name__}."
            )
        checked = MonitorSettings(path, **settings)
        self._names = names_of(params)
        before = checked_count("steps_before", steps_before, lowest=0)
        start = _stats(self._shown(opt_state), before)
        # That of the next step, where no notes have it.
        self._scale: Any = start.next_scale
        super().__init__(core.Monitor(checked, rule), start.step)

    def step(
        self,
        opt_state: Any,
        loss: Any = None,
        *,
        steps: int = 1,
    ) -> None:
        """Takes note of a step.

        Args:
            opt_state: The state after it, or what holds it as `opt_state`.
            loss: The loss of the step, not scaled, a scalar; None if it is not known. Without it
                nothing tells an overflow from a loss that is not finite.
            steps: How many steps were run since the last call, where a compiled function runs
                several. Then the optimizer must be `noted`, and the last one is read.

        Raises:
            TrainingHaltedError: If an alarm ends training. What was recorded is in the files then.
            ArgumentError, ArgumentTypeError: If an argument cannot be used; nothing is read then.
            UnsupportedError: If it is called in a compiled function. It is a `NotImplementedError`.
        """
        shown = self._shown(opt_state)
        if _any_gone(shown):
            raise ArgumentError(
                "The arrays of `opt_state` are gone: a step with donate_argnums has taken them. "
                "Pass the state that the step returned."
            )
        if np.ndim(loss):
            raise ArgumentError(
                f"`loss` must be a scalar. Received: an array of shape {np.shape(loss)}. Take the "
                "mean, or that of the last step."
            )
        if checked_count("steps", steps) > 1 and shown.noted is None:
            raise ArgumentError(
                "The scale of the last of several steps is known only if the steps note it: "
                f"tx = lossscale.optax.noted(tx). Received: steps={steps}."
            )
        position, scale = self._position + steps, self._scale

        def read(before: int) -> StepStats | None:
            if _any_gone(shown):
                return None
            stats = _stats(shown, position)
            if shown.noted is None:
                return stats._replace(scale=float(scale))
            after = min(before, stats.step - 1)
            noted = notes.read(self._names, shown.noted[1], after, stats.step)
            return stats._replace(scale=noted.scale, last_skip=noted.skip)

        if shown.noted is None:
            # A later step may take the buffer.
            self._scale = jnp.copy(shown.scale)
        self._took(steps, read, loss)

    def _shown(self, opt_state: Any) -> _Shown:
        """The arrays to read, of which none is read yet."""
        state = state_in(opt_state)
        if isinstance(_value(state.loss_scale), jax.core.Tracer):
            raise UnsupportedError(
                "A Monitor is called outside of compiled functions, and reads what they return. "
                "Received: a state that is being traced."
            )
        whole = opt_state if isinstance(opt_state, tuple) else getattr(opt_state, "opt_state", None)
        kept = None
        if isinstance(whole, NotedState):
            kept = _value(whole.noted_steps), jax.tree.map(_value, whole.notes, is_leaf=_is_kept)
            if kept[1].nonfinite.shape[0] != len(self._names):
                raise ArgumentError(
                    f"`params` has {len(self._names)} arrays that are trained, and the state "
                    f"has notes of {kept[1].nonfinite.shape[0]}. Pass the parameters that "
                    "tx.init was called with."
                )
        scale = _value(state.loss_scale)
        if np.ndim(scale):
            raise ArgumentError(
                "The loss scale must be a scalar. Received: an array of shape "
                f"{np.shape(scale)}. Of a state that is replicated for pmap pass one replica: "
                "jax.tree.map(lambda x: x[0], opt_state)."
            )
        return _Shown(kept, scale, _value(state.steps_skipped), _value(state.last_step_skipped))


def _stats(shown: _Shown, position: int) -> StepStats:
    number = position if shown.noted is None else shown.noted[0]
    step, scale, count, skipped = jax.device_get((number, *shown[1:]))
    return StepStats(int(step), float(scale), float(scale), int(count), bool(skipped))


def _value(array: Any) -> Any:
    # flax.nnx keeps an array in a variable, which gives it when it is asked.
    return array.get_value() if _is_kept(array) else array


def _is_kept(leaf: Any) -> bool:
    return hasattr(leaf, "get_value")


def _any_gone(shown: _Shown) -> bool:
    """Whether a later step has taken the buffer of an array."""
    leaves = jax.tree.leaves(shown)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)

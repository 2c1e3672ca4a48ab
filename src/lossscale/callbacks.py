"""The monitor of `fit`: a callback of the framework in use."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Self

from lossscale import registry
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.framework_types import KerasOptimizer, Library, Model, Scalar
from lossscale.monitoring.loop import LoopMonitor
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import MonitorSettings, Recorder, StepStats
from lossscale.optimizer import LossScaleOptimizer

__all__ = ["LossScaleMonitor"]


class LossScaleMonitor:
    """Records what the loss scale does while a model trains, and warns when something is wrong.

    Put it before the other callbacks of `fit`. On each sampled step it reads the loss scale, the
    reason of a skip, and the variables whose gradients had infinities or NaN. On other steps it
    reads nothing. It adds `loss_scale` and `steps_skipped` to `logs`, so that the progress bar,
    `History` and a `CSVLogger` after it show them.

    The object is a `lossscale.tf_keras.LossScaleMonitor` if `TF_USE_LEGACY_KERAS` is set or only
    tf_keras is imported, otherwise a `lossscale.keras.LossScaleMonitor`. These are the classes to
    inherit from. If a model has several optimizers, as a GAN has, pass a monitor for each.

    The first `fit` with a monitor compiles the training step again, so that it tracks overflows.
    This is not saved with the optimizer, and training gives the same numbers as without it.

    Args:
        path: A new file for the records, JSON lines. None writes no file.
        every: Sample each step whose number is a multiple of this, and the first and the last one.
            Skipped steps in between are counted, and the last of them is recorded too. With
            `steps_per_execution`, the last step of an execution represents all of them.
        log: Called with each record as a dictionary, `lossscale.monitoring.StepRecord.to_dict`,
            after it is written. Its exceptions leave `fit`, with the weights of the sampled step.
        optimizer: The `lossscale.LossScaleOptimizer` to watch. None watches `model.optimizer`.
        name: Prefix of the names in `logs`, for several monitors: "d" adds `d_loss_scale` and
            `d_steps_skipped`, and records `d_loss` as the loss if `logs` has it.

    Raises:
        ArgumentError: If an argument is invalid; the message names it.
        ArgumentTypeError: If an argument has the wrong type.

    Examples:
        >>> LossScaleMonitor(every=0)
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentError: `every` must be an integer of at least 1. Received:
        every=0.
    """

    # Set by Keras' callback.
    model: Any

    # Set by each framework: the module `keras` or `tf_keras`.
    _library: ClassVar[Library]

    # The optimizer whose steps were recorded, and what is made with it.
    _recorded: KerasOptimizer | None = None
    _recorder: Recorder
    # While `fit` runs, the watched optimizer, and from the first step on the counter of steps.
    _optimizer: KerasOptimizer | None = None
    _loop: LoopMonitor | None = None

    def __new__(
        cls, *args: Any, optimizer: object = None, name: str | None = None, **kwargs: Any
    ) -> Self:
        if cls is LossScaleMonitor:
            cls = registry.package(registry.default_keras().package).LossScaleMonitor
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        log: Callable[[dict[str, Any]], object] | None = None,
        optimizer: LossScaleOptimizer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not (optimizer is None or hasattr(optimizer, "_track_overflows")):
            raise ArgumentTypeError(
                "`optimizer` must be a lossscale.LossScaleOptimizer of Keras. Received: a "
                f"{_kind(optimizer)}. For PyTorch, use lossscale.torch.Monitor."
            )
        if not (name is None or isinstance(name, str)):
            raise ArgumentTypeError(f"`name` must be a string. Received: name={name!r}.")
        self._given, self._prefix = optimizer, f"{name}_" if name else ""
        # tf_keras then leaves `logs` on the device, where nothing waits for them. Its constructor
        # sets the attribute too.
        self._supports_tf_logs = True
        self._settings = MonitorSettings(path, every, log)

    # `help()` shows the signature of `__new__`.
    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined]  # optional

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return None if self._recorded is None else self._recorder.last_record

    # What `fit` calls.

    def set_model(self, model: object) -> None:
        """Sets the model that is trained."""
        super().set_model(model)  # type: ignore[misc]  # of Keras' callback, the next base
        if self.model is not None and not isinstance(self.model, self._library.Model):
            raise ArgumentError(
                "This LossScaleMonitor is for another Keras than the model. Take "
                "lossscale.keras.LossScaleMonitor for a model of Keras 3, "
                "lossscale.tf_keras.LossScaleMonitor for one of tf_keras."
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model, creates the file, and has the training step compiled again."""
        model = self.model
        self._optimizer = self._loop = None
        optimizer = self._watched_in(model)
        if self._recorded is not optimizer:
            self._recorder = Recorder(self._settings, optimizer.rule)
            self._recorded = optimizer
        self._recorder.open()
        self._instrument(model, optimizer)
        self._optimizer = optimizer
        self._thread = threading.get_ident()
        self._mean_is_finite = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras starts a new mean of the loss."""
        self._mean_is_finite = True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Marks the first step of an execution, which may be of several steps."""
        if self._optimizer is None:
            return
        self._first_of_execution = batch
        if self._loop is None:
            # Not at the start of training, because another callback may restore a checkpoint there.
            self._loop = LoopMonitor(self._recorder, self._stats().step)
            self._optimizer._overflow_tracker.count_from(self._shown.step)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads a sampled step, and adds the last known numbers to `logs`."""
        if self._loop is None:
            return
        self._check_thread()
        steps = batch - self._first_of_execution + 1
        logs = {} if logs is None else logs
        loss = logs.get(f"{self._prefix}loss", logs.get("loss"))
        # If an earlier step may have made the mean NaN, it says nothing of this one. A mean that is
        # not read may be on the device, and reading it would wait for the step.
        is_of_step, self._mean_is_finite = self._mean_is_finite and steps == 1, False
        read = functools.partial(self._read, loss, is_of_step)
        self._loop._add_steps(steps, read)
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the current numbers to `logs`."""
        if self._optimizer is None:
            return
        self._check_thread()
        self._stats()
        self._show(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Records the last step if it was not sampled."""
        if self._loop is not None:
            self._loop.close()
        self._optimizer = self._loop = None

    # --- Before training ----------------------------------------------------------------------

    def _watched_in(self, model: Model) -> KerasOptimizer:
        """The optimizer to watch."""
        optimizer = model.optimizer if self._given is None else self._given
        if isinstance(optimizer, LossScaleOptimizer):
            return optimizer
        raise ArgumentError(
            "LossScaleMonitor watches a lossscale.LossScaleOptimizer. The optimizer of the model "
            f"{model.name!r} is a {_kind(optimizer)}. Wrap the optimizer before compile; if the "
            "model has several optimizers, pass LossScaleMonitor(optimizer=...) for each."
        )

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ArgumentTypeError(
                "Keras runs a callback in another thread unless it is given in a list. "
                "Pass `callbacks=[monitor]` to fit, not the monitor alone."
            )

    def _instrument(self, model: Model, optimizer: KerasOptimizer) -> None:
        """Makes the training step of a model track overflows."""
        if optimizer._overflow_tracker is not None:
            return
        strategy = getattr(model, "distribute_strategy", None)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            built_with = getattr(optimizer, "_trainable_variables", None)
            ready = model.trainable_variables if model.built else ()
            optimizer._track_overflows(built_with or ready)
        # `fit` has already compiled its step, without the tracker.
        model.train_function = None
        # That of tf_keras may only be returned.
        model.train_function = model.make_train_function() or model.train_function

    # --- One sample ---------------------------------------------------------------------------

    def _stats(self) -> StepStats:
        # On JAX the optimizer's variables are out of date within an epoch.
        model: Model = getattr(self, "_model", None)
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        optimizer: KerasOptimizer = self._optimizer
        scale = float(optimizer._current_scale())
        skipped, last_skipped = int(optimizer.steps_skipped), bool(optimizer.last_step_skipped)
        self._shown = StepStats(int(optimizer.iterations), scale, scale, skipped, last_skipped)
        return self._shown

    def _read(self, mean: Scalar | None, is_of_step: bool, last_read: int) -> StepStats:
        """Reads the last step, with the loss, the mean over the epoch that Keras reports."""
        optimizer: KerasOptimizer = self._optimizer
        stats, tracker = self._stats(), optimizer._overflow_tracker
        tracker.count_from(stats.step)
        loss = None if mean is None else float(mean)
        self._mean_is_finite = loss is not None and math.isfinite(loss)
        if not (self._mean_is_finite or is_of_step):
            loss = None
        # No step was taken, for example because all variables are frozen.
        if stats.step == last_read:
            return stats
        scale, skip = tracker.read(min(last_read, stats.step - 1), stats.step)
        return stats._replace(scale=scale, last_skip=skip, loss=loss)

    def _show(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            logs[f"{self._prefix}loss_scale"] = self._shown.next_scale
            logs[f"{self._prefix}steps_skipped"] = self._shown.steps_skipped


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"

"""What the monitors of both generations of Keras do: when they read, and what they make of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from lossscale import registry
from lossscale.common.notes import Notes
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.monitor import (
    Monitor,
    MonitorSettings,
    StepStats,
    float16_without_scaling,
)
from lossscale.monitoring.record import StepRecord
from lossscale.optimizer import LossScaleOptimizer
from lossscale.packages import warn


class MonitorBody:
    """The methods that `fit` calls. What differs between frameworks is in the subclasses."""

    # Set by Keras' callback.
    model: Any

    # Of the class for a framework: its name, the module `keras` or `tf_keras`, and what makes of
    # a variable what Python can make a number of.
    _framework: ClassVar[str | None]
    _library: ClassVar[Any]
    _array_of: Callable[[Any], Any]

    _settings: MonitorSettings
    _optimizer: Any = None
    # Of the optimizer beside it.
    _monitor: Monitor | None = None
    _watched: Any = None
    # The stats of the last sample.
    _before: Any = None

    # What a framework has to say.

    def _scales_by_itself(self, optimizer: Any) -> bool:
        """Whether it is one of the framework's own ways of loss scaling."""
        raise NotImplementedError

    def _instrument(self, model: Any) -> None:
        """Lets the training step note what is needed."""
        raise NotImplementedError

    def _steps(self, optimizer: Any) -> Any:
        """The variable that counts every step, skipped ones included."""
        raise NotImplementedError

    def _trained(self, model: Any) -> Any:
        """The model itself, of one that may be wrapped."""
        return model

    def _sync(self) -> None:
        """Brings the optimizer's variables up to date in the middle of an epoch."""

    # What `fit` calls.

    def set_model(self, model: Any) -> None:
        """Takes the model that is trained."""
        if model is not None and not isinstance(self._trained(model), self._library.Model):
            raise ArgumentError(_other_framework(self._framework))
        super().set_model(model)  # type: ignore[misc]

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the model, opens the files, and has the training step compiled."""
        model = self.model
        self._optimizer = None
        self._check(model)
        if not isinstance(model.optimizer, LossScaleOptimizer):
            warn(float16_without_scaling(f"the model {model.name!r}"))
            return
        self._monitor = self._monitor_of(model.optimizer)
        self._watched = model.optimizer
        self._monitor.open()
        self._instrument(model)
        self._optimizer = model.optimizer
        self._thread = threading.get_ident()
        self._before = None
        self._mean_is_finite: bool | None = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A new epoch: Keras' mean of the loss starts anew."""
        self._mean_is_finite = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes where an execution starts, which may be of several steps."""
        if self._optimizer is None:
            return
        self._first_of_execution = batch
        if self._before is None:
            # Not at the start of training: a callback may still have restored a checkpoint there.
            self._at_start = self._before = self._shown = self._stats()
            self._position = self._before.step
            self._notes.count_from(self._position)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reads a sampled step, and adds the last known numbers to `logs`."""
        if self._optimizer is None:
            return
        self._check_thread()
        steps = batch - self._first_of_execution + 1
        start, self._position = self._position, self._position + steps
        loss = (logs or {}).get("loss")
        # The first step too: skips are counted from the first record on.
        is_first = self._before is self._at_start
        if is_first or self._settings.samples(start, self._position):
            self._sync()
            self._sample(self._own_loss(loss, steps))
        else:
            self._look_at_mean(loss)
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the current numbers to `logs`."""
        if self._optimizer is None:
            return
        self._check_thread()
        self._sync()
        self._shown = self._stats()
        self._show(logs)
        self._monitor_now.flush()

    def on_train_end(self, logs: Any = None) -> None:
        """Records the last step, if it was not sampled, and closes the files."""
        if self._optimizer is None:
            return
        if self._before is not None:
            self._sync()
            if self._stats().step > self._before.step:
                self._sample(None)
        self._monitor_now.close()
        self._optimizer = None

    # --- Before training ----------------------------------------------------------------------

    def _check(self, model: Any) -> None:
        optimizer: Any = model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            if optimizer._framework != self._framework:
                raise ArgumentError(_other_framework(self._framework))
            if getattr(optimizer, "_state", None) is None:
                raise ArgumentError(
                    "LossScaleMonitor needs a rule, and this optimizer has a LossScale with an "
                    "update of its own, whose lowest scale is not known. Write it as a "
                    "lossscale.ScaleRule."
                )
            return
        scaled = self._scales_by_itself(optimizer)
        if scaled or not self._computes_in_float16(model):
            kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            why = (
                "It has a loss scaling of its own, which cannot be watched."
                if scaled
                else "There is no loss scaling, and no layer computes in float16 to need it."
            )
            raise ArgumentError(
                "LossScaleMonitor watches lossscale.LossScaleOptimizer. The optimizer of the model "
                f"{model.name!r} is a {kind}. {why} Wrap the optimizer before compile, "
                "lossscale.LossScaleOptimizer(optimizer), or leave the monitor out."
            )

    def _computes_in_float16(self, model: Any) -> bool:
        return any(layer.compute_dtype == "float16" for layer in model._flatten_layers())

    def _monitor_of(self, optimizer: Any) -> Monitor:
        settings, earlier = self._settings, self._monitor
        if earlier is not None and self._watched is optimizer:
            return earlier
        if earlier is not None and settings.path and not settings.append:
            raise ArgumentError(
                f"This LossScaleMonitor has recorded another optimizer in {settings.path!r}. Make "
                "a new one with another `path`, or pass append=True for a run that goes on."
            )
        return Monitor(settings, optimizer.rule)

    @property
    def _monitor_now(self) -> Monitor:
        assert self._monitor is not None
        return self._monitor

    @property
    def _last(self) -> StepRecord | None:
        return None if self._monitor is None else self._monitor.last_record

    @property
    def _notes(self) -> Notes:
        notes: Notes = self._optimizer._notes
        return notes

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ArgumentTypeError(
                "Keras runs a callback beside the training step unless it is given in a list. "
                "Pass `callbacks=[monitor]` to fit, and not the monitor by itself."
            )

    # --- The loss -----------------------------------------------------------------------------

    def _look_at_mean(self, loss: Any) -> None:
        """Follows on a step that is not sampled whether Keras' mean of the loss is finite."""
        if isinstance(loss, float):
            self._mean_is_finite = math.isfinite(loss)
        elif self._mean_is_finite:
            # On the device, where nobody looks.
            self._mean_is_finite = None

    def _own_loss(self, mean: Any, steps: int) -> float | None:
        """The mean over the epoch; None if it is spoiled, maybe, by another step than the last.

        Args:
            mean: What Keras says of the loss.
            steps: How many steps it has taken since it last said it.
        """
        if mean is None:
            return None
        was_finite, mean = self._mean_is_finite, float(mean)
        self._mean_is_finite = math.isfinite(mean)
        known = self._mean_is_finite or (was_finite is True and steps == 1)
        return mean if known else None

    # --- One sample ---------------------------------------------------------------------------

    def _stats(self) -> StepStats:
        optimizer, array_of = self._optimizer, self._array_of
        scale = float(array_of(optimizer._current_scale()))
        return StepStats(
            int(array_of(self._steps(optimizer))),
            scale,
            scale,
            int(array_of(optimizer._steps_skipped)),
            bool(array_of(optimizer._last_step_skipped)),
        )

    def _sample(self, loss: float | None) -> None:
        before, stats = self._before, self._stats()
        self._before = self._shown = stats
        self._position = stats.step
        self._notes.count_from(stats.step)
        if before.step == stats.step:
            # No step was taken, as with variables that are all frozen.
            return
        noted = self._notes.read(min(before.step, stats.step - 1), stats.step)
        self._monitor_now.observe(
            stats._replace(scale=noted.scale, last_skip=noted.skip, loss=loss)
        )

    def _show(self, logs: Any) -> None:
        if logs is not None:
            logs["loss_scale"] = self._shown.next_scale
            logs["steps_skipped"] = self._shown.steps_skipped

    @staticmethod
    def _register(combined: type[Any], written: type[Any]) -> None:
        """Nothing to do: callbacks are in no file."""


def _other_framework(framework: str | None) -> str:
    own = registry.named(str(framework))
    others = [
        f"framework={other.name!r} for a model of {other.title}"
        for other in registry.kerases()
        if other is not own
    ]
    return (
        f"This LossScaleMonitor is for {own.title}, and the model is not. Make it with "
        f"{' or '.join(others)}."
    )

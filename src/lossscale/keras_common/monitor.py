"""The part of the monitor callback that Keras 3 and tf_keras share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from lossscale import registry
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.recorder import MonitorSettings, Recorder, StepStats
from lossscale.optimizer import LossScaleOptimizer
from lossscale.packages import warn


class MonitorCallback:
    """The methods that `fit` calls. Subclasses implement the differences between frameworks."""

    # Set by Keras' callback.
    model: Any

    # Set by subclasses: the framework's name, the module `keras` or `tf_keras`, and a function
    # that returns the value of a variable as an array that Python's int and float take.
    _framework: ClassVar[str | None]
    _library: ClassVar[Any]
    _array_of: Callable[[Any], Any]

    _settings: MonitorSettings
    # The watched optimizer, while `fit` runs.
    _optimizer: Any = None
    _recorder: Any
    # The optimizer whose steps were recorded.
    _recorded: Any = None
    # The stats of the last sample.
    _before: Any = None

    # Implemented by each framework: whether an optimizer is the framework's own loss scale
    # optimizer; makes a model's training step track overflows; returns the variable of an optimizer
    # that counts every step, skipped ones included.
    _scales_by_itself: Callable[[Any], bool]
    _instrument: Callable[[Any], None]
    _steps: Callable[[Any], Any]

    def _trained(self, model: Any) -> Any:
        """Returns the model, which may be wrapped."""
        return model

    def _sync(self) -> None:
        """Updates the optimizer's variables in the middle of an epoch."""

    # What `fit` calls.

    def set_model(self, model: Any) -> None:
        """Sets the model that is trained."""
        if model is not None and not isinstance(self._trained(model), self._library.Model):
            raise ArgumentError(_other_framework(self._framework))
        super().set_model(model)  # type: ignore[misc]

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the model, opens the file, and has the training step compiled again."""
        model = self.model
        self._optimizer = None
        self._check(model)
        if not isinstance(model.optimizer, LossScaleOptimizer):
            warn(
                f"float16 without loss scaling: the model {model.name!r} computes in float16 and "
                "its loss is not scaled. Gradients up to 2**-25 become zero, without an error. "
                "Wrap the optimizer: lossscale.LossScaleOptimizer(optimizer)."
            )
            return
        self._recorder = self._recorder_of(model.optimizer)
        self._recorded = model.optimizer
        self._recorder.open()
        self._instrument(model)
        self._optimizer = model.optimizer
        self._thread = threading.get_ident()
        self._before = None
        self._mean_is_finite: bool | None = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras starts a new mean of the loss."""
        self._mean_is_finite = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Marks the first step of an execution, which may be of several steps."""
        if self._optimizer is None:
            return
        self._first_of_execution = batch
        if self._before is None:
            # Not at the start of training, because another callback may restore a checkpoint there.
            self._at_start = self._before = self._shown = self._stats()
            self._position = self._before.step
            self._optimizer._overflow_tracker.count_from(self._position)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reads a sampled step, and adds the last known numbers to `logs`."""
        if self._optimizer is None:
            return
        self._check_thread()
        steps = batch - self._first_of_execution + 1
        start, self._position = self._position, self._position + steps
        loss = (logs or {}).get("loss")
        # The first step is sampled too: skips are counted from the first record.
        is_first = self._before is self._at_start
        if is_first or self._settings.samples(start, self._position):
            self._sync()
            self._sample(self._loss_of_step(loss, steps))
        else:
            self._follow_mean(loss)
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the current numbers to `logs`."""
        if self._optimizer is None:
            return
        self._check_thread()
        self._sync()
        self._shown = self._stats()
        self._show(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Records the last step if it was not sampled, and closes the file."""
        if self._optimizer is None:
            return
        if self._before is not None:
            self._sync()
            if self._stats().step > self._before.step:
                self._sample(None)
        self._recorder.close()
        self._optimizer = None

    # --- Before training ----------------------------------------------------------------------

    def _check(self, model: Any) -> None:
        optimizer: Any = model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            if optimizer._framework != self._framework:
                raise ArgumentError(_other_framework(self._framework))
            if optimizer._state.decide is not None:
                raise ArgumentError(
                    "LossScaleMonitor does not know the lowest scale of a LossScale with its own "
                    "`update`. Write it as a lossscale.ScaleRule."
                )
            return
        scaled = self._scales_by_itself(optimizer)
        dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
        if scaled or "float16" not in dtypes:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            why = (
                "It has its own loss scaling, which cannot be watched."
                if scaled
                else "There is no loss scaling, and no layer computes in float16 to need it."
            )
            raise ArgumentError(
                "LossScaleMonitor watches lossscale.LossScaleOptimizer. The optimizer of the model "
                f"{model.name!r} is a {kind}. {why} Wrap the optimizer before compile, "
                "lossscale.LossScaleOptimizer(optimizer), or leave the monitor out."
            )

    def _recorder_of(self, optimizer: Any) -> Any:
        settings, earlier = self._settings, self._recorder
        if earlier is not None and self._recorded is optimizer:
            return earlier
        if earlier is not None and settings.path and not settings.append:
            raise ArgumentError(
                f"This LossScaleMonitor has recorded another optimizer in {settings.path!r}. Make "
                "a new one with another `path`, or pass append=True for a run that continues."
            )
        return Recorder(settings, optimizer.rule)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ArgumentTypeError(
                "Keras runs a callback in another thread unless it is given in a list. "
                "Pass `callbacks=[monitor]` to fit, not the monitor alone."
            )

    # --- The loss -----------------------------------------------------------------------------

    def _follow_mean(self, loss: Any) -> None:
        """Checks on a step that is not sampled whether Keras' mean of the loss is finite."""
        if isinstance(loss, float):
            self._mean_is_finite = math.isfinite(loss)
        elif self._mean_is_finite:
            # It is on the device, and reading it would wait for the step.
            self._mean_is_finite = None

    def _loss_of_step(self, mean: Any, steps: int) -> float | None:
        """Returns the mean over the epoch; None if an earlier step may have made it NaN.

        Args:
            mean: The loss that Keras reports.
            steps: Number of steps since its report before.
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
        tracker = self._optimizer._overflow_tracker
        tracker.count_from(stats.step)
        if before.step == stats.step:
            # No step was taken, for example because all variables are frozen.
            return
        scale, skip = tracker.read(min(before.step, stats.step - 1), stats.step)
        self._recorder.observe(stats._replace(scale=scale, last_skip=skip, loss=loss))

    def _show(self, logs: Any) -> None:
        if logs is not None:
            logs["loss_scale"] = self._shown.next_scale
            logs["steps_skipped"] = self._shown.steps_skipped


def _other_framework(framework: str | None) -> str:
    own = next(each for each in registry.KERASES if each.root == framework)
    others = [
        f"framework={other.root!r} for a model of {other.title}"
        for other in registry.KERASES
        if other is not own
    ]
    return (
        f"This LossScaleMonitor is for {own.title}, and the model is not. Make it with "
        f"{' or '.join(others)}."
    )

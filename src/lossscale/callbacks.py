"""The monitor of `fit`: a callback of the framework in use."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from lossscale import registry
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import MonitorSettings, Recorder, StepStats
from lossscale.optimizer import LossScaleOptimizer
from lossscale.packages import warn

__all__ = ["LossScaleMonitor"]


class LossScaleMonitor:
    """Records what the loss scale does while a model trains, and warns when something is wrong.

    Put it before the other callbacks of `fit`. On each sampled step it reads the loss scale, the
    reason of a skip, and the variables whose gradients had infinities or NaN. On other steps it
    reads nothing. It adds `loss_scale` and `steps_skipped` to `logs`, so that the progress bar,
    `History` and a `CSVLogger` after it show them.

    The object is a `lossscale.tf_keras.LossScaleMonitor` if `TF_USE_LEGACY_KERAS` is set or only
    tf_keras is imported, otherwise a `lossscale.keras.LossScaleMonitor`. These are the classes to
    inherit from. The model's optimizer must be a `lossscale.LossScaleOptimizer`. If a float16 model
    is trained without loss scaling, the monitor warns and does nothing else.

    The first `fit` with a monitor compiles the training step again, so that it tracks overflows.
    This is not saved with the optimizer, and training gives the same numbers as without it.

    Args:
        path: A file for the records, JSON lines; see `lossscale.monitoring.read_records`. None
            writes no file.
        every: Sample each step whose number is a multiple of this, and the first and the last one.
            Skipped steps in between are counted, and the last of them is recorded too. With
            `steps_per_execution`, the last step of an execution represents all of them.
        log: Called with each record as a dictionary, `lossscale.monitoring.StepRecord.to_dict`,
            after it is written. Its exceptions leave `fit`.
        on_floor: Action when a step is skipped at `min_scale`: "warn", "raise" to end training, or
            "ignore".
        append: Whether to continue the file `path` if it exists, as a resumed run does.

    Raises:
        ArgumentError: If an argument is invalid; the message names it.
        ArgumentTypeError: If an argument has the wrong type.

    `fit` raises `lossscale.errors.TrainingHaltedError` when an alarm ends training, after the
    records are written.

    Examples:
        >>> LossScaleMonitor(every=0)
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentError: `every` must be an integer of at least 1. Received:
        every=0.
    """

    # Set by Keras' callback.
    model: Any

    # Set by each framework: its name, and the module `keras` or `tf_keras`.
    _framework: ClassVar[str | None] = None
    _library: ClassVar[Any]

    # The recorder and the optimizer whose steps it recorded; the watched one, while `fit` runs; the
    # stats of the last sample.
    _recorder: Any = None
    _recorded: Any = None
    _optimizer: Any = None
    _before: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is LossScaleMonitor:
            # Before any framework is imported.
            MonitorSettings(*args, **kwargs)
            cls = registry.package(registry.default_keras().package).LossScaleMonitor
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        log: Callable[[dict[str, Any]], object] | None = None,
        on_floor: Literal["warn", "raise", "ignore"] = "warn",
        append: bool = False,
    ) -> None:
        super().__init__()
        # tf_keras then leaves `logs` on the device, where nothing waits for them. Its constructor
        # sets the attribute too.
        self._supports_tf_logs = True
        self._settings = MonitorSettings(path, every, log, on_floor, append)

    # `help()` shows the signature of `__new__`.
    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls._framework is None:
            raise ArgumentTypeError(
                "A subclass must name its framework. Received: class "
                f"{cls.__name__}(lossscale.callbacks.LossScaleMonitor). Inherit from "
                "lossscale.keras.LossScaleMonitor or lossscale.tf_keras.LossScaleMonitor."
            )

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return None if self._recorder is None else self._recorder.last_record

    # What `fit` calls.

    def set_model(self, model: object) -> None:
        """Sets the model that is trained."""
        # PyTorch's DistributedDataParallel has the model inside.
        of_ours = [each for each in (model, getattr(model, "module", None)) if each is not None]
        if of_ours and not any(isinstance(each, self._library.Model) for each in of_ours):
            raise ArgumentError(_OTHER_FRAMEWORK)
        super().set_model(model)  # type: ignore[misc]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model, creates the file, and has the training step compiled again."""
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
        self._mean_is_finite = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras starts a new mean of the loss."""
        self._mean_is_finite = True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Marks the first step of an execution, which may be of several steps."""
        if self._optimizer is None:
            return
        self._first_of_execution = batch
        if self._before is None:
            # Not at the start of training, because another callback may restore a checkpoint there.
            self._at_start = self._before = self._shown = self._stats()
            self._position = self._before.step
            self._optimizer._overflow_tracker.count_from(self._position)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
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
            # It may be on the device, and reading it would wait for the step.
            self._mean_is_finite = False
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the current numbers to `logs`."""
        if self._optimizer is None:
            return
        self._check_thread()
        self._sync()
        self._shown = self._stats()
        self._show(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Records the last step if it was not sampled."""
        if self._optimizer is None:
            return
        if self._before is not None:
            self._sync()
            if self._stats().step > self._before.step:
                self._sample(None)
        self._optimizer = None

    # --- Before training ----------------------------------------------------------------------

    def _check(self, model: Any) -> None:
        optimizer: Any = model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            if optimizer._framework != self._framework:
                raise ArgumentError(_OTHER_FRAMEWORK)
            if optimizer._state.decide is not None:
                raise ArgumentError(
                    "LossScaleMonitor does not know the lowest scale of a LossScale with its own "
                    "`update`. Write it as a lossscale.ScaleRule."
                )
            return
        own = self._library.mixed_precision.LossScaleOptimizer
        scaled = isinstance(optimizer, own) or bool(getattr(optimizer, "loss_scale_factor", None))
        dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
        if scaled or "float16" not in dtypes:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise ArgumentError(
                "LossScaleMonitor watches lossscale.LossScaleOptimizer. The optimizer of the model "
                f"{model.name!r} is a {kind}. Wrap the optimizer before compile, "
                "lossscale.LossScaleOptimizer(optimizer), or leave the monitor out."
            )

    def _recorder_of(self, optimizer: Any) -> Any:
        settings, earlier = self._settings, self._recorder
        if earlier is not None and self._recorded is optimizer:
            return earlier
        return Recorder(settings, optimizer.rule)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ArgumentTypeError(
                "Keras runs a callback in another thread unless it is given in a list. "
                "Pass `callbacks=[monitor]` to fit, not the monitor alone."
            )

    def _instrument(self, model: Any) -> None:
        """Makes the training step of a model track overflows."""
        if model.optimizer._overflow_tracker is not None:
            return
        strategy = getattr(model, "distribute_strategy", None)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            built_with = getattr(model.optimizer, "_trainable_variables", None)
            ready = model.trainable_variables if model.built else ()
            model.optimizer._track_overflows(built_with or ready)
        # `fit` has already compiled its step, without the tracker.
        model.train_function = None
        # That of tf_keras may only be returned.
        model.train_function = model.make_train_function() or model.train_function

    def _sync(self) -> None:
        # On JAX the optimizer's variables are out of date within an epoch.
        model: Any = getattr(self, "_model", None)
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()

    # --- The loss -----------------------------------------------------------------------------

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
        return mean if self._mean_is_finite or (was_finite and steps == 1) else None

    # --- One sample ---------------------------------------------------------------------------

    def _stats(self) -> StepStats:
        optimizer: Any = self._optimizer
        scale = float(optimizer._current_scale())
        skipped, last_skipped = int(optimizer.steps_skipped), bool(optimizer.last_step_skipped)
        return StepStats(int(optimizer.iterations), scale, scale, skipped, last_skipped)

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


_OTHER_FRAMEWORK = (
    "This LossScaleMonitor is for another Keras than the model. Take "
    "lossscale.keras.LossScaleMonitor for a model of Keras 3, lossscale.tf_keras.LossScaleMonitor "
    "for one of tf_keras."
)

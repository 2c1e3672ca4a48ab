"""The monitor of `fit`: a callback of the framework in use."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from lossscale import registry
from lossscale.errors import ArgumentTypeError
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import MonitorSettings, Recorder

__all__ = ["LossScaleMonitor"]


class LossScaleMonitor:
    """Records what the loss scale does while a model trains, and warns when something is wrong.

    Put it before the other callbacks of `fit`. On each sampled step it reads the loss scale, the
    reason of a skip, and the variables whose gradients had infinities or NaN. On other steps it
    reads nothing. It adds `loss_scale` and `steps_skipped` to `logs`, so that the progress bar,
    `History` and a `CSVLogger` after it show them.

    The object is a `keras.callbacks.Callback`, or a callback of tf_keras. To write a subclass,
    inherit from `lossscale.keras.LossScaleMonitor` or `lossscale.tf_keras.LossScaleMonitor`. The
    model's optimizer must be a `lossscale.LossScaleOptimizer`. If a float16 model is trained
    without loss scaling, the monitor warns and does nothing else.

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
        max_consecutive_skips: Number of skips in a row that ends training. None for no limit.
        append: Whether to continue the file `path` if it exists, as a resumed run does.
        framework: "keras" or "tf_keras". None takes tf_keras if `TF_USE_LEGACY_KERAS` is set or
            only tf_keras is imported, otherwise Keras 3.

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

    _framework: ClassVar[str | None] = None

    _recorder: Recorder | None = None

    def __new__(cls, *args: Any, framework: str | None = None, **kwargs: Any) -> Self:
        if cls is LossScaleMonitor:
            # Before any framework is imported.
            MonitorSettings(*args, **kwargs)
            cls = registry.monitor_for(framework)
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        log: Callable[[dict[str, Any]], object] | None = None,
        on_floor: Literal["warn", "raise", "ignore"] = "warn",
        max_consecutive_skips: int | None = None,
        append: bool = False,
        framework: Literal["keras", "tf_keras"] | None = None,
    ) -> None:
        super().__init__()
        self._settings = MonitorSettings(path, every, log, on_floor, max_consecutive_skips, append)

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

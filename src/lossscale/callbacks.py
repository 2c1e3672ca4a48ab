"""A callback that watches the loss scale during `fit`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from lossscale import registry
from lossscale.monitoring.monitor import MonitorSettings
from lossscale.monitoring.record import StepRecord

__all__ = ["LossScaleMonitor"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


class LossScaleMonitor:
    """Records what the loss scale does while a model trains, and warns when something is wrong.

    Put it in front of the other callbacks of `fit`. On every sampled step it reads the loss scale
    and, if the step was skipped, why, and which variables had gradients with infinities or NaN. On
    other steps it reads nothing. `logs` gets `loss_scale` (dimensionless) and `steps_skipped` (in
    steps), so that the progress bar, `History` and a `CSVLogger` after it show them.

    The object is a `keras.callbacks.Callback`, or one of tf_keras. The model's optimizer must be a
    `lossscale.LossScaleOptimizer`. Of a float16 model without loss scaling it warns, and does
    nothing else.

    The first `fit` with a monitor compiles the training step anew, with the counting in it. What
    is counted is neither saved with the optimizer nor changes what it does.

    Args:
        path: A file for the history, JSON lines; see `lossscale.monitoring.read_records`. None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same, and the last of them is recorded too. With
            `steps_per_execution` the last step of an execution stands for all of it.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to add to the file `path` if it exists, as a resumed run does.
        framework: "keras" or "tf_keras". None takes tf_keras if `TF_USE_LEGACY_KERAS` is set or
            only that is imported, otherwise Keras 3.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.

    `fit` raises `lossscale.errors.TrainingHaltedError` when an alarm ends training. What was
    recorded is in the file by then.

    Examples:
        >>> LossScaleMonitor(every=0)
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentError: `every` must be an integer of at least 1. Received:
        every=0.
    """

    _framework: ClassVar[str | None] = None

    def __new__(cls, *args: Any, framework: str | None = None, **kwargs: Any) -> Any:
        if cls._framework is None:
            if cls is LossScaleMonitor:
                # Before any framework is imported.
                MonitorSettings(*args, **kwargs)
            monitor = registry.monitor_for(framework)
            cls = monitor if cls is LossScaleMonitor else registry.combined(cls, monitor)
        return super().__new__(cls)

    def __init__(
        self,
        path: Any = None,
        *,
        framework: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._settings = MonitorSettings(path, **settings)

    if not TYPE_CHECKING:
        # `help()` would show what `__new__` takes, and no setting.
        __init__.__signature__ = inspect.Signature(
            [
                inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                *inspect.signature(MonitorSettings).parameters.values(),
                inspect.signature(__init__).parameters["framework"],
            ]
        )
        __new__.__signature__ = __init__.__signature__

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return self._last

    @property
    def _last(self) -> StepRecord | None:
        return None

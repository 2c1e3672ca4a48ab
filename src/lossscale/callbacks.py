"""A callback that watches the loss scale during `fit`."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lossscale import registry
from lossscale.checks import checked_count, checked_truth
from lossscale.diagnostics.alarms import Alarms
from lossscale.diagnostics.recorder import ON_WRITE_ERROR
from lossscale.diagnostics.records import StepRecord
from lossscale.diagnostics.tensorboard import check_installed
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.rules import DynamicScale


class Settings(NamedTuple):
    """The arguments of a monitor, checked."""

    path: str | None
    every: int
    tensorboard: str | None
    histograms: bool
    on_floor: str
    max_consecutive_skips: int | None
    append: bool
    on_write_error: str
    fidelity_every: int | None = None
    fidelity_data: Any = None


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
        path: A file for the history, JSON lines; see `TrainingHistory.read`. None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same, and the last of them is recorded too. With
            `steps_per_execution` the last step of an execution stands for all of it.
        tensorboard: A folder for TensorBoard, or None. It needs `lossscale[tensorboard]`.
        histograms: Whether to count the exponents of all gradients on sampled steps, and write
            them into `path` and `tensorboard`.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to go on with the file `path` if it exists, as a resumed run does.
        on_write_error: What it is that `path` or `tensorboard` cannot be written any more, as on a
            full disk: "warn" to warn once and train on without it, or "raise" to end training.
        fidelity_every: After how many steps to measure what float16 loses at the scale in use, and
            after the first one; in steps. It takes one run of the model in float32 and one in
            float16. None for never.
        fidelity_data: The batch to measure on, (x, y) or (x, y, sample_weight): arrays in the
            structures that `fit` takes, of as many rows as a batch of training. It is the same
            batch each time, so that what changes is the model. Needed with `fidelity_every`.
        framework: "keras" or "tf_keras". None takes tf_keras if `TF_USE_LEGACY_KERAS` is set or
            only that is imported, otherwise Keras 3.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.
        ArgumentTypeError: If a path is no path. It is a `TypeError`.
        MissingPackageError: If `tensorboard` is given and tensorboardX is not installed. It is an
            `ImportError`.

    `fit` raises `lossscale.errors.TrainingHaltedError` when an alarm ends training. What was
    recorded is in the files by then. It raises `lossscale.errors.RecordingError` before the first
    step if a file cannot be written.

    Example:
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
                checked_settings(*args, **kwargs)
            monitor = registry.monitor_for(framework)
            cls = monitor if cls is LossScaleMonitor else registry.combined(cls, monitor)
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        tensorboard: str | os.PathLike[str] | None = None,
        histograms: bool = False,
        on_floor: str = "warn",
        max_consecutive_skips: int | None = None,
        append: bool = False,
        on_write_error: str = "warn",
        fidelity_every: int | None = None,
        fidelity_data: Any = None,
        framework: str | None = None,
    ) -> None:
        super().__init__()
        self._settings = checked_settings(
            path,
            every=every,
            tensorboard=tensorboard,
            histograms=histograms,
            on_floor=on_floor,
            max_consecutive_skips=max_consecutive_skips,
            append=append,
            on_write_error=on_write_error,
            fidelity_every=fidelity_every,
            fidelity_data=fidelity_data,
        )

    if not TYPE_CHECKING:
        # `help()` would show what `__new__` takes.
        __new__.__signature__ = inspect.signature(__init__)

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return self._last

    @property
    def _last(self) -> StepRecord | None:
        return None


def checked_settings(
    path: Any = None,
    *,
    every: Any = 1,
    tensorboard: Any = None,
    histograms: Any = False,
    on_floor: Any = "warn",
    max_consecutive_skips: Any = None,
    append: Any = False,
    on_write_error: Any = "warn",
    fidelity_every: Any = None,
    fidelity_data: Any = None,
) -> Settings:
    """Checks the arguments that every monitor takes."""
    settings = Settings(
        path=_path("path", path),
        every=checked_count("every", every),
        tensorboard=_path("tensorboard", tensorboard),
        histograms=checked_truth("histograms", histograms, ArgumentTypeError),
        on_floor=on_floor,
        max_consecutive_skips=max_consecutive_skips,
        append=checked_truth("append", append, ArgumentTypeError),
        on_write_error=on_write_error,
        fidelity_every=(
            None if fidelity_every is None else checked_count("fidelity_every", fidelity_every)
        ),
        fidelity_data=fidelity_data,
    )
    if (fidelity_every is None) != (fidelity_data is None):
        raise ArgumentError(
            "`fidelity_every` and `fidelity_data` belong together: every how many steps to "
            "measure, and the batch (x, y) to measure on, since Keras shows a callback no data. "
            f"Received: fidelity_every={fidelity_every!r}, and `fidelity_data` is "
            f"{'None' if fidelity_data is None else 'given'}."
        )
    if fidelity_data is not None and not (
        isinstance(fidelity_data, (tuple, list)) and 1 <= len(fidelity_data) <= 3
    ):
        raise ArgumentTypeError(
            "`fidelity_data` must be a batch (x, y) or (x, y, sample_weight). "
            f"Received: a {type(fidelity_data).__name__}."
        )
    if on_write_error not in ON_WRITE_ERROR:
        raise ArgumentError(
            f"`on_write_error` must be one of {', '.join(map(repr, ON_WRITE_ERROR))}. "
            f"Received: on_write_error={on_write_error!r}."
        )
    if settings.path is not None and os.path.isdir(settings.path):
        raise ArgumentError(
            "`path` must be a file for the history, and there is a folder of that name. "
            f"Received: path={path!r}."
        )
    # They have checks of their own, whatever the rule.
    Alarms(DynamicScale(), on_floor=on_floor, max_consecutive_skips=max_consecutive_skips)
    if settings.histograms and path is None and tensorboard is None:
        raise ArgumentError(
            "`histograms=True` writes histograms into files. Give it one: `path` for the history, "
            "`tensorboard` for TensorBoard, or both."
        )
    if tensorboard is not None:
        check_installed()
    return settings


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        path = os.fspath(value)
    except TypeError:
        path = b""
    if not isinstance(path, str):
        raise ArgumentTypeError(
            f"`{name}` must be a path, a str or a pathlib.Path, or None. "
            f"Received: {name}={value!r} of type {type(value).__name__}."
        )
    if not path:
        raise ArgumentError(f"`{name}` must not be empty. Received: {name}={value!r}.")
    return path

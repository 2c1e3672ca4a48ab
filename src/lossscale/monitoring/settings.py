"""What a monitor is asked for."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from lossscale.checks import checked_count, checked_truth, class_checks_keywords
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.packages import require

ON_FLOOR = ("warn", "raise", "ignore")
ON_WRITE_ERROR = ("warn", "raise")


@class_checks_keywords("A monitor")
@dataclasses.dataclass(frozen=True)
class MonitorSettings:
    """The arguments that every monitor takes.

    Args:
        path: A file for the history, JSON lines; see `TrainingHistory.read`. None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same, and the last of them is recorded too.
        tensorboard: A folder for TensorBoard, or None. It needs `lossscale[tensorboard]`.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to go on with the file `path` if it exists, as a resumed run does.
        on_write_error: What it is that `path` or `tensorboard` cannot be written any more, as on a
            full disk: "warn" to warn once and train on without it, or "raise" to end training.
        measure_every: After how many steps to measure how wrong gradients are at the scale in use,
            and after the first one; in steps. Such a step is sampled. It takes three passes over
            `data`. None for never.
        data: A batch to measure on, the same each time, so that what changes is the model; and to
            look at where loss scaling does not help. None for none.
        loss_fn: The loss of a model and a batch, as `diagnose` takes it. None for none, or for
            that of Keras' `compile`.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.
        ArgumentTypeError: If one is of the wrong type. It is a `TypeError`.
        MissingPackageError: If `tensorboard` is given and tensorboardX is not installed. It is an
            `ImportError`.

    Examples:
        >>> MonitorSettings(every=100).every
        100
    """

    path: Any = None
    every: int = 1
    tensorboard: Any = None
    on_floor: str = "warn"
    max_consecutive_skips: int | None = None
    append: bool = False
    on_write_error: str = "warn"
    measure_every: int | None = None
    data: Any = None
    loss_fn: Any = None

    def samples(self, before: int, step: int) -> bool:
        """Whether one of the steps after `before`, up to `step`, is to be sampled or measured."""
        return any(
            step // every > before // every for every in (self.every, self.measure_every) if every
        )

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: _path(name, self) for name in ("path", "tensorboard")}
        checked["every"] = checked_count("every", self.every)
        checked["append"] = checked_truth("append", self.append, ArgumentTypeError)
        for name, allowed in (("on_floor", ON_FLOOR), ("on_write_error", ON_WRITE_ERROR)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"`{name}` must be one of {', '.join(map(repr, allowed))}. "
                    f"Received: {name}={getattr(self, name)!r}."
                )
        for name in ("max_consecutive_skips", "measure_every"):
            if getattr(self, name) is not None:
                checked[name] = checked_count(name, getattr(self, name))
        if self.measure_every is not None and self.data is None:
            raise ArgumentError(
                "`measure_every` needs `data`: the batch to measure on. "
                f"Received: measure_every={self.measure_every!r}, data=None."
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ArgumentTypeError(
                "`loss_fn` must be a function that returns the loss, as diagnose takes it. "
                f"Received: a {type(self.loss_fn).__name__}."
            )
        if checked["path"] is not None and os.path.isdir(checked["path"]):
            raise ArgumentError(
                "`path` must be a file for the history, and there is a folder of that name. "
                f"Received: path={self.path!r}."
            )
        if self.tensorboard is not None:
            require("tensorboardX", purpose="Writing for TensorBoard")
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _path(name: str, settings: MonitorSettings) -> str | None:
    value = getattr(settings, name)
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

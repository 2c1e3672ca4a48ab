"""The monitor of a training loop in PyTorch."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch

from lossscale.callbacks import checked_settings
from lossscale.checks import checked_count
from lossscale.common.loop_monitor import LoopMonitor
from lossscale.common.notes import Noted
from lossscale.common.probing import checked_fidelity
from lossscale.common.watching import Status, Watch
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.torch.diagnosis.diagnose import probe
from lossscale.torch.diagnosis.model_gradients import LossFn
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.notes import LoopNotes, named
from lossscale.torch.optimizer import TorchLossScaleOptimizer


class Monitor(LoopMonitor):
    """Records what the loss scale does in a loop of your own, and warns when something is wrong.

    Call `step` after each step (with a `GradScaler` after `update()`), and `close` at the end, or
    use it in a `with`. On sampled steps it reads the loss scale and, if the step was skipped, why,
    and which parameters had gradients with infinities or NaN. On others it reads nothing, but what
    overflowed is noted on each skipped step.

    With `decide="device"` the optimizer's verdict is waited for on each step while it is watched.

    Args:
        optimizer: A `lossscale.torch.LossScaleOptimizer` or a `lossscale.torch.GradScaler`.
        model: The module, or (name, parameter) pairs, for the names of parameters. With an
            optimizer it may be None; then parameters are numbered.
        path: A file for the history, JSON lines; see `lossscale.diagnostics.TrainingHistory.read`.
            None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same, and the last of them is recorded too.
        tensorboard: A folder for TensorBoard, or None. It needs `lossscale[tensorboard]`.
        histograms: Whether to count the exponents of all gradients, unscaled, on steps whose number
            is a multiple of `every`, and write them into `path` and `tensorboard`.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to go on with the file `path` if it exists, as a resumed run does.
        on_write_error: What it is that `path` or `tensorboard` cannot be written any more: "warn"
            to warn once and train on without it, or "raise" to end training.
        fidelity_every: After how many steps to measure what float16 loses at the scale in use, and
            after the first one; in steps, a multiple of `every`. It takes one run of the model in
            float32 and one in float16. None for never. `model` must be a module then.
        loss_fn: Given the model and a batch, returns the loss, as for `lossscale.torch.diagnose`.
        fidelity_data: The batch to measure on, the same each time, so that what changes is the
            model.
        steps_before: With a `GradScaler`, how many steps the run has behind it. An optimizer knows
            it by itself.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.
        ArgumentTypeError: If one is of the wrong type. It is a `TypeError`.
        MissingPackageError: If `tensorboard` is given and tensorboardX is not installed. It is an
            `ImportError`.
        RecordingError: If a file cannot be written. It is an `OSError`.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8)
        >>> with lossscale.torch.Monitor(optimizer, model) as monitor:
        ...     loss = (model(torch.ones(1, 2)) * torch.tensor([[1e38]])).sum()
        ...     optimizer.scale_loss(loss).backward()
        ...     optimizer.step()
        ...     monitor.step(0.25)
        >>> record = monitor.last_record
        >>> record.scale, record.next_scale, str(record.reason), str(record.nonfinite[0])
        (8.0, 4.0, 'overflow', 'weight (2 inf)')
    """

    def __init__(
        self,
        optimizer: Any,
        model: Any = None,
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
        loss_fn: LossFn | None = None,
        fidelity_data: Any = None,
        steps_before: int = 0,
    ) -> None:
        settings = checked_settings(
            path,
            every=every,
            tensorboard=tensorboard,
            histograms=histograms,
            on_floor=on_floor,
            max_consecutive_skips=max_consecutive_skips,
            append=append,
            on_write_error=on_write_error,
        )
        _check_watched(optimizer)
        self._watched = optimizer
        self._is_scaler = isinstance(optimizer, GradScaler)
        if self._is_scaler and model is None:
            raise ArgumentTypeError(
                "A GradScaler does not know what it scales: give Monitor the model, for the names "
                "of its parameters. Received: model=None."
            )
        probes = checked_fidelity(fidelity_every, loss_fn, fidelity_data, settings.every)
        if probes is not None and loss_fn is not None:
            self._fidelity_every, self._probe = probes, probe(model, loss_fn, fidelity_data)
        before = checked_count("steps_before", steps_before, lowest=0)
        self._skips = int(optimizer.steps_skipped)
        self._skipped = False
        self._start = before
        self._notes = LoopNotes(
            _names(optimizer, model, self._is_scaler),
            settings.every if settings.histograms else None,
            self._number,
        )
        versions = {"torch": metadata.version("torch")}
        super().__init__(Watch(optimizer.rule, settings, versions), settings.every, self._status())
        optimizer.__dict__["_watcher"] = self

    def decided(self, groups: Any, *, scale: Any, applied: bool, divisor: Any = None) -> None:
        """Takes note of what the optimizer has decided. It is called by the optimizer."""
        self._skipped = self._skipped or not applied
        self._notes.decided(groups, scale=scale, applied=applied, divisor=divisor)

    def step(self, loss: Any = None) -> None:
        """Takes note of a step that was made.

        Args:
            loss: The loss of the step, not scaled: a number, or a tensor with one element; None if
                it is not known. Without it nothing tells an overflow from a loss that is not
                finite.

        Raises:
            TrainingHaltedError: If an alarm ends training. What was recorded is in the files then.
            RecordingError: If a file cannot be written and that is to end training.
            ArgumentError: If `loss` has several elements; nothing is read then.
        """
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ArgumentError(
                    "`loss` must be a number or a tensor with one element. Received: a tensor of "
                    f"shape {tuple(loss.shape)}. Take the mean."
                )
            # A graph must not be kept until it is read.
            loss = loss.detach()
        if self._is_scaler:
            self._start += 1
            self._skips += self._skipped
        status = self._status()
        self._skipped = False

        def read(before: Status) -> tuple[Status, Noted]:
            if self._notes.noted <= before.step:
                # No gradient, or a step that was made behind its back.
                return status, Noted(before.scale, None, None)
            return status, self._notes.read(min(before.step, status.step - 1), status.step)

        if status.step > self._position:
            self._took(status.step - self._position, read, loss)

    def close(self) -> None:
        """Records the last step, if it was not sampled, and closes the files."""
        if vars(self._watched).get("_watcher") is self:
            del vars(self._watched)["_watcher"]
        super().close()

    def _number(self) -> int:
        """How many steps came before the one that is being made."""
        return self._start if self._is_scaler else int(self._watched.iterations)

    def _status(self) -> Status:
        watched = self._watched
        if self._is_scaler:
            return Status(self._start, watched.get_scale(), self._skips, self._skipped)
        return Status(
            int(watched.iterations),
            float(watched.loss_scale),
            int(watched.steps_skipped),
            bool(watched.last_step_skipped),
        )


def _check_watched(optimizer: Any) -> None:
    if not isinstance(optimizer, (TorchLossScaleOptimizer, GradScaler)):
        more = ""
        if isinstance(optimizer, torch.amp.GradScaler):
            more = " lossscale.torch.GradScaler takes the place of PyTorch's."
        elif isinstance(optimizer, torch.optim.Optimizer):
            more = " Wrap it: lossscale.torch.LossScaleOptimizer(optimizer)."
        raise ArgumentTypeError(
            "Monitor watches a lossscale.torch.LossScaleOptimizer or a lossscale.torch.GradScaler. "
            f"Received: a {type(optimizer).__module__}.{type(optimizer).__qualname__}.{more}"
        )
    if isinstance(optimizer, GradScaler) and not optimizer.is_enabled():
        raise ArgumentError("The GradScaler is disabled, so there is no loss scale to watch.")
    if vars(optimizer).get("_watcher") is not None:
        raise ArgumentError("It is watched already. Close the other Monitor first.")


def _names(optimizer: Any, model: Any, is_scaler: bool) -> dict[Any, str]:
    """The parameters and their names; those of an optimizer that have none are numbered."""
    found = {} if model is None else named(model)
    if is_scaler:
        return found
    names = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            numbered = f"param_groups[{index}]['params'][{number}]"
            names[parameter] = found.get(parameter, numbered)
    return names

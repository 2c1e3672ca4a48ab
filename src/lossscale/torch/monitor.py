"""The monitor of a training loop in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from lossscale.checks import checked_count
from lossscale.common.notes import Noted
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring import monitor as core
from lossscale.monitoring.loop import LoopMonitor
from lossscale.monitoring.monitor import MonitorSettings, StepStats
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
        path: A file for the history, JSON lines; see `lossscale.monitoring.read_records`.
            None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same, and the last of them is recorded too.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to add to the file `path` if it exists, as a resumed run does.
        steps_before: With a `GradScaler`, how many steps the run has behind it. An optimizer knows
            it by itself.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.
        ArgumentTypeError: If one is of the wrong type. It is a `TypeError`.
        OSError: If the file cannot be written, or exists and `append` is False.

    Examples:
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
        path: Any = None,
        *,
        steps_before: int = 0,
        **settings: Any,
    ) -> None:
        checked = MonitorSettings(path, **settings)
        _check_watched(optimizer)
        self._watched = optimizer
        self._is_scaler = isinstance(optimizer, GradScaler)
        if self._is_scaler and model is None:
            raise ArgumentTypeError(
                "A GradScaler does not know what it scales: give Monitor the model, for the names "
                "of its parameters. Received: model=None."
            )
        self._start = checked_count("steps_before", steps_before, lowest=0)
        self._skips = int(optimizer.steps_skipped)
        self._skipped = False
        self._notes = LoopNotes(_names(optimizer, model, self._is_scaler), self._number)
        self._scale = float(optimizer.get_scale() if self._is_scaler else optimizer.loss_scale)
        super().__init__(core.Monitor(checked, optimizer.rule), self._number())
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
        now, scale = self._stats(), self._scale
        self._skipped, self._scale = False, now.next_scale

        def read(before: int) -> StepStats:
            noted = Noted(scale, None)
            # Otherwise there was no gradient, or a step was made behind its back.
            if self._notes.noted > before:
                noted = self._notes.read(min(before, now.step - 1), now.step)
            return now._replace(scale=noted.scale, last_skip=noted.skip)

        if now.step > self._position:
            self._took(now.step - self._position, read, loss)

    def close(self) -> None:
        """Records the last step, if it was not sampled, and closes the files."""
        if vars(self._watched).get("_watcher") is self:
            del vars(self._watched)["_watcher"]
        super().close()

    def _number(self) -> int:
        """How many steps came before the one that is being made."""
        return self._start if self._is_scaler else int(self._watched.iterations)

    def _stats(self) -> StepStats:
        watched = self._watched
        if self._is_scaler:
            scale = watched.get_scale()
            return StepStats(self._start, scale, scale, self._skips, self._skipped)
        scale = float(watched.loss_scale)
        return StepStats(
            int(watched.iterations),
            scale,
            scale,
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
        elif isinstance(optimizer, torch.nn.Module):
            more = " The model comes second: Monitor(optimizer, model)."
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

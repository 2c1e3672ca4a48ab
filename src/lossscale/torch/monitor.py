"""The monitor of a training loop in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch

from lossscale.checks import checked_count
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.loop import LoopMonitor
from lossscale.monitoring.recorder import MonitorSettings, Recorder, StepStats
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.optimizer import LossScaleOptimizer
from lossscale.torch.overflow_tracker import LoopOverflowTracker


class Monitor(LoopMonitor):
    """Records what the loss scale does in a training loop, and warns when something is wrong.

    Call `step` after each training step (with a `GradScaler` after `update()`), and `close` at the
    end; or use it in a `with`. On sampled steps it reads the loss scale and, if the step was
    skipped, why, and which parameters had gradients with infinities or NaN. On other steps it reads
    nothing, but tracks what overflows on each skipped step.

    With `decide="device"` each watched step waits for the decision.

    Args:
        optimizer: A `lossscale.torch.LossScaleOptimizer` or a `lossscale.torch.GradScaler`; also
            what Lightning and Accelerate return for such an optimizer.
        model: The module, or (name, parameter) pairs, for the names of parameters. With an
            optimizer it may be None; then parameters are numbered.
        path: A file for the records, JSON lines; see `lossscale.monitoring.read_records`. None
            writes no file.
        every: Sample steps whose number is a multiple of this, and the first and the last one.
            Skipped steps in between are counted, and the last one is recorded too.
        log: Called with each record as a dictionary, `lossscale.monitoring.StepRecord.to_dict`,
            after it is written; what it raises, `step` and `close` raise.
        on_floor: Action when a step is skipped at `min_scale`: "warn", "raise" to end training, or
            "ignore".
        max_consecutive_skips: Number of skips in a row that ends training. None for no limit.
        append: Whether to continue the file `path` if it exists, as a resumed run does.
        steps_before: Number of steps before this run, with a `GradScaler`. An optimizer has it.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it.
        ArgumentTypeError: If one is of the wrong type.
        OSError: If the file cannot be written.

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
        optimizer: torch.optim.Optimizer | torch.amp.GradScaler,
        model: torch.nn.Module | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        log: Callable[[dict[str, Any]], object] | None = None,
        on_floor: Literal["warn", "raise", "ignore"] = "warn",
        max_consecutive_skips: int | None = None,
        append: bool = False,
        steps_before: int = 0,
    ) -> None:
        settings = MonitorSettings(path, every, log, on_floor, max_consecutive_skips, append)
        optimizer = _wrapper_in(optimizer)
        _check_watched(optimizer)
        self._watched = optimizer
        self._is_scaler = isinstance(optimizer, GradScaler)
        if self._is_scaler and model is None:
            raise ArgumentTypeError(
                "Monitor of a GradScaler needs the model, for the names of its parameters. "
                "Received: model=None. Write Monitor(scaler, model)."
            )
        # A scaler does not count steps.
        self._steps = checked_count("steps_before", steps_before, lowest=0)
        self._skips = int(optimizer.steps_skipped)
        self._decided = self._skipped = False
        names = _names(optimizer, model, self._is_scaler)
        self._tracker = LoopOverflowTracker(names, self._steps_so_far)
        self._scale = float(optimizer.get_scale() if self._is_scaler else optimizer.loss_scale)
        super().__init__(Recorder(settings, optimizer.rule), self._steps_so_far())
        optimizer.__dict__["_watcher"] = self

    def decided(self, groups: Any, *, scale: Any, applied: bool, divisor: Any = None) -> None:
        """Tracks a decision of the optimizer, which calls this."""
        self._decided = True
        self._skipped = self._skipped or not applied
        self._tracker.decided(groups, scale=scale, applied=applied, divisor=divisor)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """Counts a training step, and records it if it is sampled.

        A call without a step of the optimizer since the last call, as with accumulated gradients,
        does nothing.

        Args:
            loss: The unscaled loss of the step: a number, or a tensor with one element; None if it
                is not known. Without it an overflow cannot be told from a loss that is not finite.

        Raises:
            TrainingHaltedError: If an alarm ends training. The records are in the file then.
            ArgumentError: If `loss` has several elements, or after `close`; nothing is read then.
        """
        self._check_open()
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ArgumentError(
                    "`loss` must be a number or a tensor with one element. Received: a tensor of "
                    f"shape {tuple(loss.shape)}. Pass the mean."
                )
            # Detached, so that the graph is not kept until the loss is read.
            loss = loss.detach()
        if self._is_scaler and self._decided:
            self._steps += 1
            self._skips += self._skipped
        now, scale = self._stats(), self._scale
        self._decided, self._skipped, self._scale = False, False, now.next_scale

        def read(last_read: int) -> StepStats:
            # Otherwise the optimizer took a step before the monitor was attached.
            if self._tracker.last_tracked <= last_read:
                return now._replace(scale=scale)
            tracked = self._tracker.read(min(last_read, now.step - 1), now.step)
            return now._replace(scale=tracked[0], last_skip=tracked[1])

        if now.step > self._position:
            self._add_steps(now.step - self._position, read, loss)

    def close(self) -> None:
        """Records the last step if it was not sampled, and closes the file.

        Closing it again does nothing; `step` is an error afterwards.
        """
        if vars(self._watched).get("_watcher") is self:
            del vars(self._watched)["_watcher"]
        super().close()

    def _steps_so_far(self) -> int:
        """Returns the number of steps before the current one."""
        return self._steps if self._is_scaler else int(self._watched.iterations)

    def _stats(self) -> StepStats:
        watched = self._watched
        if self._is_scaler:
            scale = watched.get_scale()
            return StepStats(self._steps, scale, scale, self._skips, self._skipped)
        scale = float(watched.loss_scale)
        return StepStats(
            int(watched.iterations),
            scale,
            scale,
            int(watched.steps_skipped),
            bool(watched.last_step_skipped),
        )


def _wrapper_in(optimizer: Any) -> Any:
    """Returns the optimizer that a trainer has wrapped."""
    attributes = getattr(optimizer, "__dict__", {})
    # LightningOptimizer copies the attributes of the optimizer, and keeps the original.
    for name in ("_optimizer", "optimizer"):
        if isinstance(attributes.get(name), LossScaleOptimizer):
            return attributes[name]
    return optimizer


def _check_watched(optimizer: Any) -> None:
    if not isinstance(optimizer, (LossScaleOptimizer, GradScaler)):
        more = ""
        if isinstance(optimizer, torch.amp.GradScaler):
            more = " Use lossscale.torch.GradScaler in place of PyTorch's."
        elif isinstance(optimizer, torch.optim.Optimizer):
            more = " Wrap it: lossscale.torch.LossScaleOptimizer(optimizer)."
        elif isinstance(optimizer, torch.nn.Module):
            more = " The model is the second argument: Monitor(optimizer, model)."
        raise ArgumentTypeError(
            "Monitor watches a lossscale.torch.LossScaleOptimizer or a lossscale.torch.GradScaler. "
            f"Received: a {type(optimizer).__module__}.{type(optimizer).__qualname__}.{more}"
        )
    if isinstance(optimizer, GradScaler) and not optimizer.is_enabled():
        raise ArgumentError("The GradScaler is disabled, so there is no loss scale to watch.")
    if vars(optimizer).get("_watcher") is not None:
        raise ArgumentError("Another Monitor already watches this optimizer. Close it first.")


def _parameter_names(parameters: Any) -> dict[Any, str]:
    """Returns the names of parameters.

    Args:
        parameters: A module, or an iterable of (name, parameter) pairs.

    Raises:
        ArgumentTypeError: If it is neither.
    """
    pairs = parameters
    if isinstance(parameters, torch.nn.Module):
        pairs = parameters.named_parameters()
    names: dict[Any, str] | None
    try:
        names = {parameter: name for name, parameter in pairs}
    except (TypeError, ValueError):
        names = None
    if names is None or not all(
        isinstance(p, torch.Tensor) and isinstance(n, str) for p, n in names.items()
    ):
        is_path = isinstance(parameters, str | os.PathLike)
        raise ArgumentTypeError(
            "Expected a module, or (name, parameter) pairs such as "
            f"model.named_parameters(). Received: {parameters!r} of type "
            f"{type(parameters).__name__}."
            + (f" The file of the records is path={parameters!r}." if is_path else "")
        )
    return names


def _names(optimizer: Any, model: Any, is_scaler: bool) -> dict[Any, str]:
    """Returns the names of the parameters; parameters without a name are numbered."""
    known = {} if model is None else _parameter_names(model)
    if is_scaler:
        return known
    names = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            numbered = f"param_groups[{index}]['params'][{number}]"
            names[parameter] = known.get(parameter, numbered)
    return names

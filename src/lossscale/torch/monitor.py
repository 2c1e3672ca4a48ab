"""The monitor of a training loop in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lossscale.checks import checked_count
from lossscale.common import overflow_tracker
from lossscale.common.overflow_tracker import CheckedStep
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.loop import LoopMonitor
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import MonitorSettings, Recorder, SkippedStep, StepStats
from lossscale.packages import warn
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.observers import Decided, Observer
from lossscale.torch.optimizer import LossScaleOptimizer, wrapper_in
from lossscale.torch.ranks import local
from lossscale.torch.scaling import CPU, is_finite, real_parts, uncompiled


class Monitor(LoopMonitor, Observer):
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
        path: A new file for the records, JSON lines. None writes no file.
        every: Sample steps whose number is a multiple of this, and the first and the last one.
            Skipped steps in between are counted, and the last one is recorded too.
        log: Called with each record as a dictionary, `lossscale.monitoring.StepRecord.to_dict`,
            after it is written; what it raises, `step` and `close` raise.
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
        ...     record = monitor.step(0.25)
        >>> record.scale, record.next_scale, str(record.reason), str(record.nonfinite[0])
        (8.0, 4.0, 'overflow', 'weight (2 inf)')
    """

    _is_monitor = _reads_skips = True

    def __init__(
        self,
        optimizer: Optimizer | torch.amp.GradScaler,
        model: Module | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        log: Callable[[dict[str, Any]], object] | None = None,
        steps_before: int = 0,
    ) -> None:
        settings = MonitorSettings(path, every, log)
        self._watched = watched = _checked(wrapper_in(optimizer))
        if isinstance(watched, GradScaler) and model is None:
            raise ArgumentTypeError(
                "Monitor of a GradScaler needs the model, for the names of its parameters. "
                "Received: model=None. Write Monitor(scaler, model)."
            )
        # A scaler does not count steps.
        self._steps = checked_count("steps_before", steps_before, lowest=0)
        self._skips = int(watched.steps_skipped)
        self._decided = self._skipped = False
        names = _names(watched, model)
        self._tracker = OverflowTracker()
        self._tracker.build(list(names), list(names.values()))
        now = self._stats()
        self._scale = now.scale
        self._model = model if isinstance(model, Module) else None
        self._finite = set(self._buffers(True))
        takes_rules = not isinstance(watched, GradScaler)
        super().__init__(Recorder(settings, watched.rule, takes_rules=takes_rules), now.step)
        self._handle = watched._observers.add(self)

    def _step_decided(self, decided: Decided) -> None:
        groups, scale, applied, divisor = decided
        self._decided = True
        self._skipped = self._skipped or not applied
        number = self._steps_so_far() + 1
        # The tracker reads the gradients of skipped steps only.
        skipped = () if applied else groups
        parameters = [p for group in skipped for p in group["params"] if p.grad is not None]

        def unscale(gradients: Iterable[Tensor]) -> list[Tensor]:
            return [g if divisor is None else g / divisor.to(g.device) for g in gradients]

        with torch.no_grad():
            self._tracker.track(
                gradients=[local(parameter.grad) for parameter in parameters],
                variables=parameters,
                unscale=unscale,
                finite=applied,
                scale=scale,
                number=number,
                is_shared=True,
            )

    def step(self, loss: Tensor | float | None = None) -> StepRecord | None:
        """Counts a training step, and records it if it is sampled.

        A call without a step of the optimizer since the last call, as with accumulated gradients,
        does nothing.

        Args:
            loss: The unscaled loss of the step: a number, or a tensor with one element; None if it
                is not known. Without it an overflow cannot be told from a loss that is not finite.

        Returns:
            The record of the step; None if it was not read, or no step was taken.

        Raises:
            ArgumentError: If `loss` has several elements, or after `close`; nothing is read then.
        """
        self._check_open()
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ArgumentError(
                    "`loss` must be a number or a tensor with one element. Received: a tensor of "
                    f"shape {tuple(loss.shape)}. Pass the mean."
                )
            # Detached, so that the graph is not kept until the loss is read.
            loss = loss.detach()
        if self._decided and isinstance(self._watched, GradScaler):
            self._steps += 1
            self._skips += self._skipped
        if self._skipped:
            self._warn_of_buffers()
        now, scale = self._stats(), self._scale
        self._decided, self._skipped, self._scale = False, False, now.next_scale

        def read(last_read: int) -> StepStats:
            number = None if loss is None else float(loss)
            # Otherwise the optimizer took a step before the monitor was attached.
            if self._tracker.last_step <= last_read:
                return now._replace(scale=scale, loss=number)
            last_scale, skip = self._tracker.read(min(last_read, now.step - 1), now.step)
            return now._replace(scale=last_scale, last_skip=skip, loss=number)

        if now.step <= self._position:
            return None
        return self._add_steps(now.step - self._position, read)

    def close(self) -> None:
        """Records the last step if it was not sampled, and watches no more.

        Closing it again does nothing; `step` is an error afterwards.
        """
        self._handle.remove()
        super().close()

    def _buffers(self, finite: bool) -> list[str]:
        """The names of the buffers of the model that are finite, or of those that are not."""
        named = () if self._model is None else self._model.named_buffers()
        return [name for name, b in named if not is_lazy(b) and is_finite(b) == finite]

    def _warn_of_buffers(self) -> None:
        """Warns, once, if a skipped step has left a buffer that is not finite any more."""
        spoiled = [name for name in self._buffers(False) if name in self._finite]
        if spoiled:
            self._finite = set()
            warn(
                f"A skipped step has left {spoiled[0]!r} of the model not finite. The forward pass "
                "changed it, and evaluation will use it. Load a checkpoint, and call "
                "lossscale.torch.guard(model, optimizer), which keeps persistent buffers finite."
            )

    def _steps_so_far(self) -> int:
        """Returns the number of steps before the current one."""
        watched = self._watched
        return self._steps if isinstance(watched, GradScaler) else int(watched.iterations)

    def _stats(self) -> StepStats:
        watched = self._watched
        if isinstance(watched, GradScaler):
            scale, skips, skipped = watched.get_scale(), self._skips, self._skipped
        else:
            scale, skips = float(watched.loss_scale), int(watched.steps_skipped)
            skipped = bool(watched.last_step_skipped)
        return StepStats(self._steps_so_far(), scale, scale, skips, skipped)


class OverflowTracker(overflow_tracker.OverflowTracker):
    """Tracks overflows in Python objects: the host knows which steps are skipped.

    Attributes:
        last_step: The number of the last step that was tracked; 0 before the first one.
    """

    counts_steps = True

    def _create(self) -> None:
        self.last_step, self._scale = 0, 0.0
        # The number of the step, its scale, and the counts by parameter of each optimizer.
        self._skip: tuple[int, Tensor | float, list[list[Tensor]]] = (0, 0.0, [])

    def count_from(self, step: int) -> None:
        """Sets the number of steps so far, which would wait if it were read from the device."""
        self.last_step = step

    # Compiled, it would be recompiled for each number that it writes.
    @uncompiled
    def _track(self, step: CheckedStep) -> None:
        number = self.last_step + 1 if step.number is None else step.number
        if not step.finite:
            counts = [_nonfinite(gradient) for gradient in self._unscaled_by_row(step)]
            # Another optimizer may have skipped in the same step.
            others = self._skip[2] if number == self.last_step == self._skip[0] else []
            self._skip = (number, step.scale, [*others, counts])
        self.last_step, self._scale = number, step.scale

    def read(self, after: int, until: int) -> tuple[float, SkippedStep | None]:
        skip, (step, scale, counts) = None, self._skip
        if after < step <= until:
            total = sum(map(_on_host, counts))
            tensors = overflow_tracker.nonfinite_tensors(self.names, total)
            skip = SkippedStep(step, float(scale), tensors)
        return float(self._scale), skip


def _nonfinite(gradient: Tensor) -> Tensor:
    """Returns the numbers of infinite elements and of NaN, int64 of shape (2,)."""
    parts = real_parts(gradient)
    if not parts:
        return torch.zeros(2, dtype=torch.int64, device=CPU)
    return torch.stack([test(parts[0]).sum() for test in (torch.isinf, torch.isnan)])


def _on_host(counts: list[Tensor]) -> numpy.ndarray[Any, Any]:
    # Those of parameters without a gradient are there already.
    device = next((count.device for count in counts if not count.is_cpu), CPU)
    return numpy.asarray(torch.stack([count.to(device) for count in counts]).cpu())


def _checked(optimizer: object) -> LossScaleOptimizer | GradScaler:
    if not isinstance(optimizer, (LossScaleOptimizer, GradScaler)):
        raise ArgumentTypeError(
            "Monitor(optimizer, model) watches a lossscale.torch.LossScaleOptimizer or a "
            "lossscale.torch.GradScaler. Received as the optimizer: a "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    if isinstance(optimizer, GradScaler) and not optimizer.is_enabled():
        raise ArgumentError("The GradScaler is disabled, so there is no loss scale to watch.")
    if optimizer._observers.have_monitor:
        raise ArgumentError("Another Monitor already watches this optimizer. Close it first.")
    return optimizer


def _names(watched: LossScaleOptimizer | GradScaler, model: object) -> dict[Tensor, str]:
    """Returns the names of the parameters.

    Args:
        watched: An optimizer, whose parameters without a name are numbered, or a scaler.
        model: A module, an iterable of (name, parameter) pairs, or None.

    Raises:
        ArgumentTypeError: If `model` is something else.
    """
    pairs: Any = () if model is None else model
    if isinstance(model, Module):
        pairs = model.named_parameters()
    try:
        names = {parameter: name for name, parameter in pairs}
        are_named = all(isinstance(p, Tensor) and isinstance(n, str) for p, n in names.items())
    except (TypeError, ValueError):
        are_named = False
    if not are_named:
        raise ArgumentTypeError(
            "Expected a module, or (name, parameter) pairs such as "
            f"model.named_parameters(). Received: model={model!r} of type {type(model).__name__}."
        )
    if isinstance(watched, GradScaler):
        return names
    return {
        parameter: names.get(parameter, f"param_groups[{index}]['params'][{number}]")
        for index, group in enumerate(watched.param_groups)
        for number, parameter in enumerate(group["params"])
    }

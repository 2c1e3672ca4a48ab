"""The observers of the steps of an optimizer or a scaler, in one list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lossscale.common.floor_warning import warned_at_floor
from lossscale.torch.scale import Flag

if TYPE_CHECKING:
    from lossscale.torch.grad_scaler import GradScaler
    from lossscale.torch.optimizer import LossScaleOptimizer

Stepper: TypeAlias = "LossScaleOptimizer | GradScaler"
"""Whose steps count."""


class Decided(NamedTuple):
    """A decision on a step, whose gradients are not applied yet.

    Attributes:
        groups: The parameter groups, with the gradients in `.grad`.
        scale: The loss scale of the step.
        applied: Whether the step is applied.
        divisor: The number to divide the gradients by; None if they are unscaled.
    """

    groups: list[dict[str, Any]]
    scale: Tensor | float
    applied: bool
    divisor: Tensor | None


class Stepped(NamedTuple):
    """A step that was applied or skipped.

    Attributes:
        stepper: The `LossScaleOptimizer` or `GradScaler`.
        skipped: Whether it was skipped: a bool, or a tensor if only the device knows.
        scale: The loss scale of the step; None if nobody needs it, or with `decide="device"`.
        optimizer: The argument of hooks; for a scaler the optimizer that it stepped.
        is_one_of_several: Whether the scaler steps other optimizers, too.
    """

    stepper: Stepper
    skipped: Flag
    scale: Tensor | float | None = None
    optimizer: Any = None
    is_one_of_several: bool = False


class Observer:
    """Is notified of steps; each method does nothing unless a subclass overrides it."""

    _is_monitor: ClassVar[bool] = False
    """Whether it wants decisions, and warns of the lowest scale itself."""
    _reads_skips: ClassVar[bool] = False
    """Whether the host has to wait for the decision on each step."""

    def _step_decided(self, decided: Decided) -> None:
        """Called with each decision; only if there is a monitor."""

    def _step_over(self, step: Stepped) -> None:
        """Called after each step, and after one that was left out if it would have been skipped."""


class Observers(OrderedDict[int, Observer]):
    """The observers of an optimizer or a scaler, in the order in which they came."""

    def add(self, observer: Observer) -> RemovableHandle:
        """Adds an observer, until `remove` of the handle is called."""
        handle = RemovableHandle(self)
        self[handle.id] = observer
        return handle

    @property
    def have_monitor(self) -> bool:
        return any(observer._is_monitor for observer in self.values())

    @property
    def read_skips(self) -> bool:
        return any(observer._reads_skips for observer in self.values())

    def decided(self, decided: Decided) -> None:
        for observer in self.values():
            observer._step_decided(decided)

    def stepped(self, step: Stepped) -> None:
        # A hook may remove itself.
        for observer in list(self.values()):
            observer._step_over(step)


class SkippedStepHook(Observer):
    """Calls a function of the user's after each step that the host knows to be skipped."""

    _reads_skips = True

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def _step_over(self, step: Stepped) -> None:
        if step.skipped is True:
            self._hook(step.optimizer)


class FloorWarning(Observer):
    """Warns once of a step that is skipped at the lowest scale."""

    _warned = False

    def _step_over(self, step: Stepped) -> None:
        if step.skipped is not True or step.scale is None or self._warned:
            return
        # A monitor warns itself.
        if not step.stepper._observers.have_monitor:
            takes_rules = not isinstance(step.stepper, torch.amp.GradScaler)
            rule, scale = step.stepper.rule, float(step.scale)
            self._warned = warned_at_floor(rule, scale, takes_rules=takes_rules)

"""The loss scale: Python numbers that the host updates, or tensors that the device updates.

Either way the loss is multiplied by a 0-d tensor that is changed in place: compiled code and CUDA
graphs keep a reference to it, and stay valid when the scale changes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale.errors import UnsupportedError
from lossscale.packages import warn
from lossscale.rules import DynamicScale, PythonNumbers, ScaleRule, ScaleState
from lossscale.torch.ranks import parameters_of
from lossscale.torch.scaling import CPU, scalar

_NO_GRADIENTS = 3
"""After how many scaled losses without any gradient a warning comes."""


Flag: TypeAlias = bool | Tensor
"""Whether a step is skipped: a bool, or on a device a float32 scalar tensor, 1 or 0."""


class Multiplier:
    """The scale that multiplied a loss; it stays when the loss scale changes.

    Args:
        scale: float32 scalar tensor that is never changed.
        rule: The rule of the loss scale.
        number: The scale as a Python float; None if only the device knows it.

    Attributes:
        records: References to the records whose gradients it has multiplied.
        divided: The ids of parameters whose gradients were divided by it when a record died.
    """

    def __init__(self, scale: Tensor, rule: ScaleRule, number: float | None) -> None:
        self._scale, self.rule, self.number = scale, rule, number
        self.records: set[weakref.ref[Any]] = set()
        self.divided: frozenset[int] = frozenset()
        self._scales: dict[torch.device, Tensor] = {}
        self._reciprocals: dict[torch.device, Tensor] = {}

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale on a device."""
        if device not in self._scales:
            number = self.number
            # Filled, because a copy from the host waits.
            scale = self._scale.to(device) if number is None else scalar(number, device)
            self._scales[device] = scale
        return self._scales[device]

    def reciprocal_on(self, device: torch.device) -> Tensor:
        """Its reciprocal on a device."""
        if device not in self._reciprocals:
            self._reciprocals[device] = self.scale_on(device).reciprocal()
        return self._reciprocals[device]

    def may_be_below_one(self) -> bool:
        """Whether the scale may be below 1, so that dividing by it can overflow."""
        lowest = self.rule.lowest_scale if self.number is None else self.number
        return lowest is None or lowest < 1.0


class Counts(NamedTuple):
    """Number of steps, number of skipped steps, and whether the last step was skipped."""

    iterations: int | Tensor
    steps_skipped: int | Tensor
    last_step_skipped: bool | Tensor


def update_on_host(rule: ScaleRule, state: ScaleState, finite: bool) -> ScaleState:
    """Returns the state of a rule after a step, as Python numbers.

    Args:
        rule: The rule.
        state: The state before, as Python numbers.
        finite: Whether the gradients are finite.

    Examples:
        >>> rule = lossscale.DynamicScale(initial_scale=8)
        >>> update_on_host(rule, rule.init(), False)
        ScaleState(scale=4.0, good_steps=0)
    """
    if rule.exact_on_host:
        # With tensors the benchmark row "SGD, small" would take 1.14 times as long.
        after: ScaleState = rule.update(state, finite, xp=PythonNumbers)
        return after
    # Python numbers would be rounded differently.
    after = rule.update(_tensors(state, CPU), scalar(finite, CPU, torch.bool), xp=torch)
    return type(after)(*map(_number, after))


def _tensors(state: ScaleState, device: torch.device) -> ScaleState:
    # PyTorch's kernel takes a count of 32 bits.
    kinds = {bool: torch.bool, int: torch.int32}
    values = (scalar(value, device, kinds.get(type(value), torch.float32)) for value in state)
    return type(state)(*values)


def _number(value: float | Tensor) -> float:
    return value.item() if torch.is_tensor(value) else value


class LossScale:
    """A rule and its state, updated on the host, which knows each value without waiting.

    Args:
        rule: The rule.
        devices: Devices of losses and gradients; others are added at their first use.

    Attributes:
        home: The device that updates it.
        start: The counts at the last load, Python numbers; each load makes another object.
    """

    on_device = False
    home = CPU
    _multiplier: Multiplier | None = None

    def __init__(self, rule: ScaleRule, devices: Iterable[torch.device]) -> None:
        devices = list(devices)
        self.rule = rule
        self.first: ScaleState = rule.init()
        fields = *self.first._fields, "iterations", "steps_skipped"
        # Their keys in an optimizer's state dictionary.
        self.names = {"loss_scale" if f == "scale" else f"loss_scale_{f}": f for f in fields}
        self.start = Counts(0, 0, False)
        self._scales: dict[torch.device, Tensor] = {}
        self._make(devices)
        for device in (CPU, *devices):
            self.scale_on(device)

    def _make(self, devices: Sequence[torch.device]) -> None:
        """Makes the state and the counts."""
        self.state: ScaleState = self.first
        self.counts = self.start

    @property
    def number(self) -> float | None:
        """The loss scale, a Python float; None if only the device knows it."""
        return float(self.state.scale)

    @property
    def multiplier(self) -> Multiplier:
        """The current loss scale; the same object until it changes."""
        if self._multiplier is None:
            self._multiplier = Multiplier(self.tensor, self.rule, self.number)
        return self._multiplier

    @property
    def tensor(self) -> Tensor:
        """A copy of the loss scale, a float32 scalar tensor."""
        return self.scale_on(self.home).clone()

    def scale_on(self, device: torch.device) -> Tensor:
        """The loss scale on a device: a float32 scalar tensor that is kept up to date."""
        scale = self._scales.get(device)
        if scale is None:
            scale = self._new_scale(device)
            if not torch.compiler.is_compiling():
                self._scales[device] = scale
        return scale

    def _new_scale(self, device: torch.device) -> Tensor:
        return scalar(float(self.state.scale), device)

    def _fill_scales(self) -> None:
        self._multiplier = None
        number = float(self.state.scale)
        for scale in self._scales.values():
            scale.fill_(number)

    def update(self, skipped: Flag) -> None:
        """Updates the scale after a step; `skipped` is a bool."""
        before = self.number
        self.state = update_on_host(self.rule, self.state, not skipped)
        if self.number != before:
            self._fill_scales()

    def count(self, skipped: Flag) -> None:
        """Counts a step; `skipped` is a bool."""
        made, before, _ = self.counts
        self.counts = Counts(made + 1, before + skipped, skipped)

    def numbers(self) -> dict[str, Any]:
        """Returns the state and the counts as Python numbers, by field."""
        named = {**self.state._asdict(), **self.counts._asdict()}
        return {name: _number(value) for name, value in named.items()}

    def restore(self, state: ScaleState, counts: Counts) -> None:
        """Sets the state and the counts from Python numbers that are valid for the rule."""
        self.state, self.counts, self.start = state, counts, Counts(*counts)
        self._fill_scales()


class DeviceLossScale(LossScale):
    """A loss scale that is updated on the first device, and read only if the user asks."""

    on_device = True
    number = None
    _kernel_moves = False
    """Whether PyTorch's kernel moves the scale as the rule does."""

    @torch.inference_mode(False)
    def _make(self, devices: Sequence[torch.device]) -> None:
        self.home = devices[0]
        self.state = _tensors(self.first, self.home)
        # A step adds the second to the first: 1, and whether it was skipped. The counts are parts.
        self._counted = scalar(0, self.home, torch.int64).repeat(2)
        self._added = scalar(True, self.home, torch.bool).repeat(2)
        self.counts = Counts(self._counted[0], self._counted[1], self._added[1])
        self._scales[self.home] = self.state.scale
        self.restore(self.first, self.start)

    @torch.inference_mode(False)
    def _new_scale(self, device: torch.device) -> Tensor:
        return self._scales[self.home].to(device, copy=True)

    def scale_on(self, device: torch.device) -> Tensor:
        scale = super().scale_on(device)
        if device == CPU != self.home:
            # A loss on the CPU needs a copy of the scale.
            scale.copy_(self._scales[self.home])
        return scale

    def _fill_scales(self) -> None:
        self._multiplier = None
        scale = self.state.scale
        for device, copy in self._scales.items():
            # Reading an unused copy would wait for the device.
            if copy is scale or device == CPU != self.home:
                continue
            copy.copy_(scale)

    def update(self, skipped: Flag) -> None:
        """Updates the scale in place; `skipped` is a float32 scalar tensor, 1 or 0."""
        if self._kernel_moves:
            # Two kernels in the place of some twenty operators on scalars.
            rule, state = cast(DynamicScale, self.rule), self.state
            numbers = rule.growth_factor, rule.backoff_factor, rule.growth_interval
            flag = cast(Tensor, skipped)
            torch._amp_update_scale_(state.scale, state.good_steps, flag, *numbers)
            state.scale.clamp_(rule.min_scale, rule.ceiling)
            self._fill_scales()
            return
        after = self.rule.update(self.state, skipped == 0, xp=torch)
        if after is not self.state:
            for tensor, value in zip(self.state, after, strict=True):
                tensor.copy_(value)
            self._fill_scales()

    def count(self, skipped: Flag) -> None:
        """Counts a step in place; `skipped` is a float32 scalar tensor, 1 or 0."""
        # All counts are tensors here, and this one is a part of `_added`.
        cast(Tensor, self.counts.last_step_skipped).copy_(cast(Tensor, skipped))
        self._counted.add_(self._added)

    def restore(self, state: ScaleState, counts: Counts) -> None:
        self.start = Counts(*counts)
        for tensor, value in zip((*self.state, *self.counts), (*state, *counts), strict=True):
            tensor.fill_(value)
        self._kernel_moves = _moves_as_torch(self.rule, state)
        self._fill_scales()


def _moves_as_torch(rule: ScaleRule, state: ScaleState) -> bool:
    """Whether PyTorch's kernel and a clamp move a scale to the same bits as the rule.

    The kernel knows no limits, and waits until the interval is reached exactly. The rule leaves a
    scale alone that would pass `max_scale`; that is where the clamp takes it, if it is a power of
    two that doubles.
    """
    return (
        type(rule) is DynamicScale
        and rule.overflows_before_backoff == 1
        and rule.powers_of_two
        and rule.growth_factor == 2.0
        and math.frexp(state.scale)[0] == 0.5
        and state.good_steps < rule.growth_interval
    )


class FirstSteps:
    """Warns of an optimizer without any gradient, and refuses one that reads others."""

    def __init__(self) -> None:
        self.without, self._is_first = 0, True

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Checks, before a first step, that the optimizer reads `.grad`.

        Raises:
            UnsupportedError: If it is one of Opacus, which reads `grad_sample`.
        """
        if self._is_first and any(hasattr(p, "grad_sample") for p in parameters):
            raise UnsupportedError(
                "An optimizer of Opacus reads `grad_sample`, which stays multiplied by the loss "
                "scale. Use it without a LossScaleOptimizer, in float32 or bfloat16."
            )

    def made(self, inner: Optimizer, is_empty: bool, is_scaled: bool) -> None:
        """Counts steps of scaled losses in a row without a gradient, and warns of the third.

        Args:
            inner: The optimizer.
            is_empty: Whether no parameter has a gradient.
            is_scaled: Whether the optimizer scaled a loss since the last step.
        """
        if not is_empty:
            self.without, self._is_first = 0, False
        elif is_scaled and any(p.requires_grad for p in parameters_of(inner)):
            self.without += 1
            if self.without == _NO_GRADIENTS:
                warn(
                    f"No parameter of {type(inner).__name__} had a gradient after the last "
                    f"{_NO_GRADIENTS} losses, so nothing trains. Either the model computes with "
                    "other parameters: make the optimizer after the model is moved, wrapped or "
                    "replaced. Or gradients were cleared before step(): leave those that are not "
                    "finite to step(), which skips them and lowers the scale."
                )

"""The loss scale: Python numbers that the host updates, or tensors that the device updates.

Either way the loss is multiplied by a 0-d tensor that is changed in place: compiled code and CUDA
graphs keep a reference to it, and stay valid when the scale changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy
import torch

from lossscale.rules import GradientStats, ScaleRule, ScaleState, host_can_update, updated_on_host
from lossscale.torch.scaling import CPU, scalar


class Factors(NamedTuple):
    """A loss scale and its reciprocal on one device; float32 scalar tensors."""

    scale: Any
    reciprocal: Any


class Multiplier:
    """The scale that multiplied a loss; it stays when the loss scale changes.

    Args:
        scale: float32 scalar tensor that is never changed.
        rule: The rule of the loss scale.
        number: The scale as a Python float; None if only the device knows it.

    Attributes:
        gradients: The `ScaledGradients` that it multiplies, or None.
    """

    gradients: Any = None

    def __init__(self, scale: Any, rule: ScaleRule, number: float | None) -> None:
        self._scale, self.rule, self.number = scale, rule, number
        self._factors: dict[Any, Factors] = {}

    def on(self, device: Any) -> Factors:
        """Returns the factors on a device."""
        factors = self._factors.get(device)
        if factors is None:
            scale = self._scale.to(device)
            factors = self._factors[device] = Factors(scale, scale.reciprocal())
        return factors


class Counts(NamedTuple):
    """Number of steps, number of skipped steps, and whether the last step was skipped."""

    iterations: Any
    steps_skipped: Any
    last_step_skipped: Any

    def plus(self, skipped: bool) -> Counts:
        """Returns the counts after another step, as Python numbers."""
        return Counts(self.iterations + 1, self.steps_skipped + skipped, skipped)


def update_on_host(rule: ScaleRule, state: ScaleState, stats: GradientStats) -> ScaleState:
    """Returns the state of a rule after a step, as Python numbers.

    Args:
        rule: The rule.
        state: The state before, as Python numbers.
        stats: Statistics of the gradients: `finite` is a bool, the others are float32 tensors on
            the CPU.

    Examples:
        >>> rule = lossscale.DynamicScale(initial_scale=8)
        >>> update_on_host(rule, rule.init(), GradientStats(False))
        ScaleState(scale=4.0, good_steps=0)
    """
    if host_can_update(rule):
        # With tensors the benchmark row "SGD, small" would take 1.14 times as long.
        return updated_on_host(rule, state, stats.finite)
    # Python numbers would be rounded differently.
    stats = stats._replace(finite=scalar(stats.finite, CPU, torch.bool))
    after = rule.update(_tensors(state, CPU), stats, xp=torch)
    return type(after)(*map(_number, after))


def _tensors(state: ScaleState, device: Any) -> ScaleState:
    kinds = {bool: torch.bool, int: torch.int64}
    return type(state)(
        *(scalar(value, device, kinds.get(type(value), torch.float32)) for value in state)
    )


def _number(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value


def saved_as(field: str) -> str:
    """Returns the name of a value of the loss scale in an optimizer's state dictionary."""
    return "loss_scale" if field == "scale" else f"loss_scale_{field}"


class LossScale:
    """A rule and its state, updated on the host, which knows each value without waiting.

    Args:
        rule: The rule.
        devices: Devices of losses and gradients; others are added at their first use.

    Attributes:
        start: The counts at the last load, Python numbers; each load makes another object.
        shown: The values by their names in a state dictionary, tensors that are kept up to date.
    """

    on_device = False
    _multiplier: Multiplier | None = None

    def __init__(self, rule: ScaleRule, devices: Iterable[Any]) -> None:
        self.rule = rule
        self.first: ScaleState = rule.init()
        fields = *self.first._fields, "iterations", "steps_skipped"
        self.names = {saved_as(field): field for field in fields}
        self.state: Any = self.first
        self.counts = self.start = Counts(0, 0, False)
        self._make_shown()
        self._factors: dict[Any, Factors] = {}
        for device in (CPU, *devices):
            self.on(device)
        self._fill_factors()

    @property
    def number(self) -> Any:
        """The loss scale, a Python float; None if only the device knows it."""
        return float(self.rule.loss_scale(self.state))

    @property
    def multiplier(self) -> Multiplier:
        """The current loss scale; the same object until it changes."""
        if self._multiplier is None:
            self._multiplier = Multiplier(self.tensor, self.rule, self.number)
        return self._multiplier

    @property
    def tensor(self) -> Any:
        """A copy of the loss scale, a float32 scalar tensor."""
        return self.on(CPU).scale.clone()

    def on(self, device: Any) -> Factors:
        """Returns the factors on a device."""
        factors = self._factors.get(device)
        if factors is None:
            scale = self._new_scale(device)
            factors = Factors(scale, scale.reciprocal())
            if not torch.compiler.is_compiling():
                self._factors[device] = factors
        return factors

    def _new_scale(self, device: Any) -> Any:
        return scalar(self.number, device)

    def _fill_factors(self) -> None:
        self._multiplier = None
        number = self.number
        for factors in self._factors.values():
            factors.scale.fill_(number)
            torch.reciprocal(factors.scale, out=factors.reciprocal)

    def _make_shown(self) -> None:
        self._numbers = numpy.zeros(len(self.names))
        # Tensors, because compiled code is recompiled for each Python number in a group.
        shown = torch.from_numpy(self._numbers).unbind()
        self.shown: dict[str, Any] = dict(zip(self.names, shown, strict=True))
        self._show()

    def _show(self) -> None:
        self._last = [*map(float, self.state), *map(float, self.counts[:2])]
        self._numbers[:] = self._last

    def written(self) -> dict[str, float]:
        """Returns the values that other code has written into `shown`."""
        now = self._numbers.tolist()
        if now == self._last:
            return {}
        changed = zip(self.names, now, self._last, strict=True)
        return {name: new for name, new, old in changed if new != old}

    def update(self, stats: GradientStats) -> None:
        """Updates the scale after a step."""
        before = self.number
        self.state = update_on_host(self.rule, self.state, stats)
        if self.number != before:
            self._fill_factors()

    def count(self, skipped: Any) -> None:
        """Counts a step; `skipped` is a bool."""
        self.counts = self.counts.plus(skipped)
        self._show()

    def numbers(self) -> dict[str, Any]:
        """Returns the state and the counts as Python numbers, by field."""
        named = {**self.state._asdict(), **self.counts._asdict()}
        return {name: _number(value) for name, value in named.items()}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        """Sets the values that `numbers` of a loss scale with this rule returned."""
        state, counts = type(self.first), Counts
        self.restore(
            state(*(numbers[field] for field in state._fields)),
            counts(*(numbers[field] for field in counts._fields)),
        )

    def restore(self, state: ScaleState, counts: Counts) -> None:
        """Sets the state and the counts from Python numbers that are valid for the rule."""
        self.state, self.counts, self.start = state, counts, Counts(*counts)
        self._show()
        self._fill_factors()


class DeviceLossScale(LossScale):
    """A loss scale that is updated on the first device, and read only if the user asks."""

    on_device = True
    number = None

    def __init__(self, rule: ScaleRule, devices: Iterable[Any]) -> None:
        devices = list(devices)
        self.home = devices[0]
        super().__init__(rule, ())
        self.state = _tensors(self.first, self.home)
        kinds = torch.int64, torch.int64, torch.bool
        self.counts = Counts(*(scalar(0, self.home, kind) for kind in kinds))
        self.shown = dict(zip(self.names, (*self.state, *self.counts[:2]), strict=True))
        for device in devices:
            self.on(device)
        self._fill_factors()

    def _make_shown(self) -> None:
        """Not needed: `shown` holds the tensors that the device updates."""

    def written(self) -> dict[str, float]:
        # The device updates the tensors in `shown`, so that what is written there counts.
        return {}

    def _new_scale(self, device: Any) -> Any:
        if self.home not in self._factors:
            return scalar(self.first.scale, device)
        return self._factors[self.home].scale.to(device, copy=True)

    @property
    def tensor(self) -> Any:
        return self.on(self.home).scale.clone()

    def on(self, device: Any) -> Factors:
        factors = super().on(device)
        if device == CPU != self.home and self.home in self._factors:
            # A loss on the CPU needs a copy of the scale.
            factors.scale.copy_(self._factors[self.home].scale)
        return factors

    def _fill_factors(self) -> None:
        self._multiplier = None
        scale = self.rule.loss_scale(self.state)
        for device, factors in self._factors.items():
            # Reading an unused copy would wait for the device.
            if device == CPU != self.home:
                continue
            factors.scale.copy_(scale) if torch.is_tensor(scale) else factors.scale.fill_(scale)
            torch.reciprocal(factors.scale, out=factors.reciprocal)

    def update(self, stats: GradientStats) -> None:
        after = self.rule.update(self.state, stats, xp=torch)
        if after is not self.state:
            for tensor, value in zip(self.state, after, strict=True):
                tensor.copy_(value)
            self._fill_factors()

    def count(self, skipped: Any) -> None:
        """Counts a step in place; `skipped` is a float32 scalar tensor, 1 or 0."""
        self.counts.iterations.add_(1)
        self.counts.steps_skipped.add_(skipped.to(torch.int64))
        self.counts.last_step_skipped.copy_(skipped)

    def restore(self, state: ScaleState, counts: Counts) -> None:
        self.start = Counts(*counts)
        for tensor, value in zip((*self.state, *self.counts), (*state, *counts), strict=True):
            tensor.fill_(value)
        self._fill_factors()

"""The loss scale: Python numbers that the host moves, or tensors that the device moves.

Either way the number that multiplies a loss is a tensor of no dimensions that is changed in place:
compiled code and CUDA graphs hold on to it, and are not recreated when the scale moves.
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
    """What a loss was multiplied by: a scale as it was then, which stays when the scale moves.

    Args:
        scale: float32 scalar tensor that nobody changes.
        rule: The rule of the scale.
        number: The same as a Python float; None if only the device knows it.
        reciprocal: Its reciprocal, if it is not to be computed.
    """

    def __init__(
        self, scale: Any, rule: ScaleRule, number: float | None, reciprocal: Any = None
    ) -> None:
        self._scale, self.rule, self.number, self._reciprocal = scale, rule, number, reciprocal
        self._factors: dict[Any, Factors] = {}

    def on(self, device: Any) -> Factors:
        """Returns the factors on a device."""
        factors = self._factors.get(device)
        if factors is None:
            scale = self._scale.to(device)
            given = self._reciprocal
            reciprocal = scale.reciprocal() if given is None else given.to(device)
            factors = self._factors[device] = Factors(scale, reciprocal)
        return factors


class Counts(NamedTuple):
    """Steps that were decided on, those that were skipped, and whether the last one was."""

    iterations: Any
    steps_skipped: Any
    last_step_skipped: Any

    def plus(self, skipped: bool) -> Counts:
        """The counts after another step, as Python numbers."""
        return Counts(self.iterations + 1, self.steps_skipped + skipped, skipped)


def update_on_host(rule: ScaleRule, state: ScaleState, stats: GradientStats) -> ScaleState:
    """The state of a rule after a step, as Python numbers.

    Args:
        rule: The rule.
        state: The state before, as Python numbers.
        stats: What the rule sees: `finite` is a bool, the rest are float32 tensors of the CPU.

    Examples:
        >>> rule = lossscale.DynamicScale(initial_scale=8)
        >>> update_on_host(rule, rule.init(), GradientStats(False))
        ScaleState(scale=4.0, good_steps=0)
    """
    if host_can_update(rule):
        # On tensors SGD, small would take 1.14 times as long.
        return updated_on_host(rule, state, stats.finite)
    # Numbers of Python would be rounded otherwise than tensors.
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
    """The name of a number in the dictionary of an optimizer."""
    return "loss_scale" if field == "scale" else f"loss_scale_{field}"


class LossScale:
    """A rule and its state, moved by the host, which knows each number without waiting.

    Args:
        rule: The rule.
        devices: Where a loss or a gradient may be; others are added when they are met.

    Attributes:
        start: What all is counted on from, Python numbers; another object for each load.
        shown: The numbers by the names that they are saved under, tensors that are kept up to date.
    """

    on_device = is_unseen = False
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
        """The loss scale as it is now; the same object until it moves."""
        if self._multiplier is None:
            self._multiplier = Multiplier(self.tensor, self.rule, self.number)
        return self._multiplier

    @property
    def tensor(self) -> Any:
        """The loss scale, a float32 scalar tensor that is nobody else's."""
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
        # Tensors, because code is recompiled for each number that it finds in a group.
        shown = torch.from_numpy(self._numbers).unbind()
        self.shown: dict[str, Any] = dict(zip(self.names, shown, strict=True))
        self._show()

    def _show(self) -> None:
        self._last = [*map(float, self.state), *map(float, self.counts[:2])]
        self._numbers[:] = self._last

    def written(self) -> dict[str, float]:
        """What others have written into `shown`."""
        now = self._numbers.tolist()
        if now == self._last:
            return {}
        changed = zip(self.names, now, self._last, strict=True)
        return {name: new for name, new, old in changed if new != old}

    def update(self, stats: GradientStats) -> None:
        """Updates the scale by what was seen of a step."""
        before = self.number
        self.state = update_on_host(self.rule, self.state, stats)
        if self.number != before:
            self._fill_factors()

    def count(self, skipped: Any) -> None:
        """Counts a step; `skipped` is a bool."""
        self.counts = self.counts.plus(skipped)
        self._show()

    def numbers(self) -> dict[str, Any]:
        """The state and the counts as Python numbers, by the names they are saved under."""
        named = {**self.state._asdict(), **self.counts._asdict()}
        return {name: _number(value) for name, value in named.items()}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        """Sets what `numbers` of a loss scale with this rule has returned."""
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
    """A loss scale that the first device moves; nothing is read from it unless a user reads it."""

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
        """What is shown are the tensors that the device moves."""

    def written(self) -> dict[str, float]:
        # The device moves them, and continues from what is written there.
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
            # A loss on the processor reads the scale where it is.
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

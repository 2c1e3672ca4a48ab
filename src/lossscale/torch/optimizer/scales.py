"""The state of a loss scale: Python numbers that the host moves, or tensors that the device moves.

Either way the number that multiplies a loss is a tensor of no dimensions that is changed in place:
compiled code and CUDA graphs hold on to it, and are not made anew when the scale moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from lossscale.rules import ScaleRule, ScaleState, Seen, host_can_update, updates_on_host

CPU = torch.device("cpu")


class Factors(NamedTuple):
    """What multiplies, on one device; float32 tensors of no dimensions.

    Attributes:
        scale: The loss scale.
        reciprocal: Its reciprocal.
        found: Where the kernel notes an overflow.
    """

    scale: Any
    reciprocal: Any
    found: Any


class Counts(NamedTuple):
    """What is counted, as Python numbers or as tensors of no dimensions.

    Attributes:
        iterations: Steps that were decided on, skipped ones included.
        steps_skipped: Steps that were skipped.
        last_step_skipped: Whether the last one was.
    """

    iterations: Any
    steps_skipped: Any
    last_step_skipped: Any


class Scales:
    """A rule, its state, and the factors on each device.

    Args:
        rule: The rule.
        devices: Where a loss or a gradient may be; others are added when they are met.
    """

    def __init__(self, rule: ScaleRule, devices: Iterable[Any]) -> None:
        self.rule = rule
        self.first = rule.init()
        self.start = Counts(0, 0, False)
        """What all is counted on from, Python numbers; another object for each load."""
        self._factors: dict[Any, Factors] = {}
        for device in (CPU, *devices):
            self.factors(device)

    def factors(self, device: Any) -> Factors:
        """Returns the factors on a device."""
        known = self._factors.get(device)
        if known is not None:
            return known
        scale = self._scale_for(device)
        made = Factors(scale, scale.reciprocal(), torch.zeros((), device=device))
        if not torch.compiler.is_compiling():
            self._factors[device] = made
        return made

    def _scale_for(self, device: Any) -> Any:
        """Returns the loss scale in a new tensor on a device."""
        if CPU in self._factors:
            return self._factors[CPU].scale.to(device, copy=True)
        return torch.full((), self.first.scale, dtype=torch.float32, device=device)

    @property
    def tensor(self) -> Any:
        """The loss scale, a float32 tensor of no dimensions that is nobody else's."""
        return self._factors[CPU].scale.clone()

    def values(self) -> dict[str, Any]:
        """Returns the state and the counts as Python numbers, by the names they are saved under."""
        raise NotImplementedError

    def restore(self, state: ScaleState, counts: Counts) -> None:
        """Sets the state and the counts from Python numbers that are valid for the rule."""
        self.start = Counts(*counts)


class HostScales(Scales):
    """The host moves the scale; it knows every number without waiting for a device."""

    def __init__(self, rule: ScaleRule, devices: Iterable[Any]) -> None:
        super().__init__(rule, devices)
        self._as_numbers = host_can_update(rule)
        self.counts = Counts(0, 0, False)
        self._set(self.first)

    def _set(self, state: ScaleState) -> None:
        # Rules whose products have to be rounded to float32 run on tensors of the processor.
        self.state = state if self._as_numbers else _tensors(state, CPU)
        self._show(float(self.rule.loss_scale(self.state)))

    def _show(self, scale: float) -> None:
        self.scale = scale
        """The loss scale, a Python float."""
        for factors in self._factors.values():
            factors.scale.fill_(scale)
            factors.reciprocal.fill_(scale).reciprocal_()

    def move(self, seen: Seen) -> None:
        """Moves the state; `seen.finite` is a bool, the rest are float32 tensors of the CPU."""
        if self._as_numbers:
            changed = updates_on_host(self.rule, self.state, seen.finite)
            if not changed:
                return
            self.state = self.state._replace(**changed)
        else:
            finite = torch.tensor(seen.finite)
            self.state = self.rule.update(self.state, seen._replace(finite=finite), xp=torch)
        scale = float(self.rule.loss_scale(self.state))
        if scale != self.scale:
            self._show(scale)

    def count(self, applied: bool) -> None:
        """Counts a step."""
        iterations, skipped, _ = self.counts
        self.counts = Counts(iterations + 1, skipped + (not applied), not applied)

    def values(self) -> dict[str, Any]:
        state = {
            field: _number(value)
            for field, value in zip(self.state._fields, self.state, strict=True)
        }
        return {**state, **self.counts._asdict()}

    def restore(self, state: ScaleState, counts: Counts) -> None:
        super().restore(state, counts)
        self._set(state)
        self.counts = counts


class DeviceScales(Scales):
    """The device moves the scale, and nothing is read from it unless a user reads it.

    Args:
        rule: The rule.
        devices: As above; the first one moves the scale.
    """

    def __init__(self, rule: ScaleRule, devices: Iterable[Any]) -> None:
        devices = list(devices)
        self.home = devices[0]
        super().__init__(rule, devices)
        self.state = _tensors(self.first, self.home)
        zero = torch.zeros((), dtype=torch.int64, device=self.home)
        self.counts = Counts(zero.clone(), zero, zero.to(torch.bool))
        self._show()

    def _scale_for(self, device: Any) -> Any:
        if self.home in self._factors:
            return self._factors[self.home].scale.to(device, copy=True)
        return super()._scale_for(device)

    @property
    def tensor(self) -> Any:
        return self._factors[self.home].scale.clone()

    def _show(self) -> None:
        scale = self.rule.loss_scale(self.state)
        for device, factors in self._factors.items():
            # The copy that nobody looks at would be waited for.
            if device == CPU != self.home:
                continue
            factors.scale.copy_(scale) if torch.is_tensor(scale) else factors.scale.fill_(scale)
            torch.reciprocal(factors.scale, out=factors.reciprocal)

    def factors(self, device: Any) -> Factors:
        known = super().factors(device)
        if device == CPU != self.home and self.home in self._factors:
            # A loss on the processor reads the scale where it is.
            known.scale.copy_(self._factors[self.home].scale)
        return known

    def move(self, seen: Seen) -> None:
        """Moves the state in place; all that was seen are tensors of the device."""
        after = self.rule.update(self.state, seen, xp=torch)
        if after is not self.state:
            for tensor, value in zip(self.state, after, strict=True):
                tensor.copy_(value)
            self._show()

    def count(self, found: Any) -> None:
        """Counts a step in place.

        Args:
            found: float32 tensor of no dimensions; 1 if it is skipped, else 0.
        """
        self.counts.iterations.add_(1)
        self.counts.steps_skipped.add_(found.to(torch.int64))
        self.counts.last_step_skipped.copy_(found)

    def values(self) -> dict[str, Any]:
        named = {**self.state._asdict(), **self.counts._asdict()}
        return {name: _number(tensor) for name, tensor in named.items()}

    def restore(self, state: ScaleState, counts: Counts) -> None:
        super().restore(state, counts)
        for tensor, value in zip((*self.state, *self.counts), (*state, *counts), strict=True):
            tensor.fill_(value)
        self._show()


def _tensors(state: ScaleState, device: Any) -> ScaleState:
    def tensor(value: Any) -> Any:
        kinds = {bool: torch.bool, int: torch.int64}
        dtype = kinds.get(type(value), torch.float32)
        return torch.full((), value, dtype=dtype, device=device)

    return type(state)(*map(tensor, state))


def _number(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value

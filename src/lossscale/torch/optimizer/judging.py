"""The verdict on the gradients of a step: they are divided, looked at once, and clipped.

The host decides and waits for one number, unless `decide="device"`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from lossscale.rules import Needs, ScaleRule, Seen, host_can_update
from lossscale.torch import gradient_stats, gradients, ranks
from lossscale.torch.gradients import Gradients
from lossscale.torch.layout import Layout
from lossscale.torch.optimizer import clipping, handing
from lossscale.torch.optimizer.scales import DeviceScales, HostScales

_ABSENT, _FINITE, _NON_FINITE = 0.0, 1.0, 2.0
"""What a process saw: no gradient, finite ones, others. The largest of all processes counts."""

_LARGEST = torch.finfo(torch.float32).max


class Verdict(NamedTuple):
    """What was decided on the gradients of a step, before anything is applied.

    Attributes:
        applied: Whether they are applied; None if only the device knows.
        seen: What the rule sees; None if nobody looked.
        found: The device's verdict: float32 tensor, 1 to skip and 0 to apply.
        divisor: What a fused optimizer still has to divide by, or None.
        empty: Whether there was no gradient, on any process.
    """

    applied: bool | None
    seen: Seen | None = None
    found: Any = None
    divisor: Any = None
    empty: bool = False


_GOOD, _BAD = Verdict(True, Seen(True)), Verdict(False, Seen(False))


def is_ordinary(inner: Any, rule: ScaleRule, scales: Any, clip_norm: float | None) -> bool:
    """Whether nothing but the verdict is asked of gradients, as far as an optimizer's settings go.

    Args:
        inner: The optimizer inside.
        rule: The rule.
        scales: Its state.
        clip_norm: What gradients are clipped to, or None.
    """
    return (
        clip_norm is None
        and isinstance(scales, HostScales)
        and host_can_update(rule)
        and rule.checks_gradients
        and rule.powers_of_two
        and rule.lowest_scale is not None
        and rule.lowest_scale >= 1.0
        and (isinstance(inner, handing.FUSED) or not hasattr(inner, "_step_supports_amp_scaling"))
    )


class Judging:
    """What a step needs to know of the gradients."""

    inner_optimizer: Any
    _rule: ScaleRule
    _scales: HostScales | DeviceScales
    _clip_norm: float | None
    _process_group: Any
    _layout: Layout | None
    _is_ordinary: bool

    def _known_layout(self) -> Layout:
        layout = self._layout
        groups = self.inner_optimizer.param_groups
        if layout is None or layout.parameters(groups) is None:
            layout = Layout(groups, self._process_group)
            # Past the settings of the optimizer inside.
            self.__dict__["_layout"] = layout
        return layout

    def _gradients(self) -> Gradients:
        groups, layout = self.inner_optimizer.param_groups, self._layout
        parameters = None if layout is None else layout.parameters(groups)
        if layout is None or parameters is None:
            layout = self._known_layout()
            parameters = layout.parameters(groups)
        return gradients.gradients_of(parameters or [], layout.one_device)

    def _judge(self, scaled: bool, in_place: bool = False) -> Verdict:
        """Divides the gradients if they are scaled, and decides.

        Args:
            scaled: Whether they are those of the scaled loss.
            in_place: Whether somebody reads them before they are applied: then nothing is left
                to the optimizer, and they are not clipped.
        """
        with torch.no_grad():
            return self._judge_here(scaled, in_place)

    def _judge_here(self, scaled: bool, in_place: bool) -> Verdict:
        rule, scales, layout = self._rule, self._scales, self._known_layout()
        if scaled and not in_place and self._needs_no_look(layout):
            # What a fused optimizer divides by itself, nobody else has to touch.
            parameters = (p for group in self.inner_optimizer.param_groups for p in group["params"])
            empty = all(p.grad is None for p in parameters)
            divisor = scales.factors(layout.devices[0]).scale
            return Verdict(True, Seen(True), divisor=None if empty else divisor, empty=empty)
        given = self._gradients()
        if not given.given and not layout.ranks:
            return Verdict(True, empty=True)
        if isinstance(scales, DeviceScales):
            return self._judge_on_device(given, scaled, layout, scales, in_place)
        if self._clip_norm is not None and not in_place:
            return self._judge_and_clip(given, scaled, layout, scales)
        if not rule.checks_gradients:
            return self._divide_and_trust(given, scaled, layout, in_place)
        if scaled and not in_place and self._only_read(given, layout, scales):
            return Verdict(True, Seen(True), divisor=scales.factors(given.device).scale)
        return self._look(given, scaled, layout)

    # --- The host decides ---------------------------------------------------------------------

    def _judge_ordinary(self) -> Verdict | None:
        """What `_judge` returns for scaled gradients of the most ordinary kind, in less time.

        With many small parameters a step is mostly the work of the interpreter.

        Returns:
            The verdict; None if something is not ordinary. Then nothing was done.
        """
        layout, inner = self._layout, self.inner_optimizer
        parameters = None if layout is None else layout.parameters(inner.param_groups)
        if layout is None or parameters is None:
            layout = self._known_layout()
            parameters = layout.parameters(inner.param_groups)
        if not self._is_ordinary or not layout.one_device or layout.ranks or layout.are_large:
            return None
        given = gradients.plain_gradients(parameters or [])
        if given is None:
            return None
        with torch.no_grad():
            factors = self._scales.factors(given[0].device)
            gradients.look_and_multiply_(given, factors.found.zero_(), factors.reciprocal)
            return _BAD if factors.found.item() else _GOOD

    def _needs_no_look(self, layout: Layout) -> bool:
        return (
            not self._rule.checks_gradients
            and self._rule.needs == Needs()
            and self._clip_norm is None
            and isinstance(self._scales, HostScales)
            and layout.one_place
            and handing.takes_scaling(self.inner_optimizer)
        )

    def _only_read(self, given: Gradients, layout: Layout, scales: HostScales) -> bool:
        """Whether gradients were seen to be finite, and a fused optimizer can divide them.

        On a processor reading large tensors takes less time than writing them, too.
        """
        return (
            layout.are_large
            and given.device.type == "cpu"
            and self._can_be_handed_a_divisor(given)
            and self._rule.needs == Needs()
            # With a scale below 1 unscaling may overflow what was finite.
            and scales.scale >= 1.0
            and not layout.ranks
            and gradients.sums_are_finite(given.groups[0])
        )

    def _divide_and_trust(
        self, given: Gradients, scaled: bool, layout: Layout, in_place: bool
    ) -> Verdict:
        """Divides gradients that nobody looks at; the rule may move all the same."""
        sizes = self._magnitudes(given, scaled, layout)
        divisor = self._divide_unlooked(given, scaled, in_place)
        return Verdict(True, gradient_stats.on_host(sizes or Seen(True)), divisor=divisor)

    def _divide_unlooked(self, given: Gradients, scaled: bool, in_place: bool) -> Any:
        """Divides gradients that nobody looks at; returns what a fused optimizer divides by."""
        if not scaled:
            return None
        factors = self._scales.factors
        if not in_place and self._can_be_handed_a_divisor(given):
            return factors(given.device).scale
        gradients.multiply_(given, factors, self._rule.powers_of_two)
        return None

    def _can_be_handed_a_divisor(self, given: Gradients) -> bool:
        return len(given.groups) == 1 and handing.takes_scaling(self.inner_optimizer)

    def _look(self, given: Gradients, scaled: bool, layout: Layout) -> Verdict:
        """Divides the gradients if they are scaled, and waits for what was found in them."""
        sizes = self._magnitudes(given, scaled, layout)
        found = self._found(given, scaled)
        if layout.ranks:
            here = found + _FINITE if given.given else found
            answer = ranks.agreed(here, layout.ranks).item()
            applied = answer != _NON_FINITE
            seen = gradient_stats.with_verdict(gradient_stats.on_host(sizes or Seen(True)), applied)
            return Verdict(applied, seen, empty=answer == _ABSENT)
        if sizes is None:
            applied = not found.item()
            return Verdict(applied, Seen(applied))
        return _told(found, sizes)

    def _found(self, given: Gradients, scaled: bool) -> Any:
        """Divides the gradients if they are scaled; returns what was found in them."""
        scales, rule = self._scales, self._rule
        if not scaled:
            return gradients.look(given, scales.factors)
        found = gradients.unscale_(given, scales.factors, rule.powers_of_two)
        # With a scale below 1 unscaling may overflow what was finite.
        if isinstance(scales, HostScales):
            may_grow = scales.scale < 1.0
        else:
            may_grow = rule.lowest_scale is None or rule.lowest_scale < 1.0
        if may_grow:
            before = found.clone()
            found = torch.maximum(before, gradients.look(given, scales.factors))
        return found

    def _magnitudes(self, given: Gradients, scaled: bool, layout: Layout) -> Seen | None:
        """What a rule sees of the gradients besides the verdict, before they are divided."""
        needs = self._rule.needs
        if needs == Needs():
            return None
        scale = self._scales.factors(given.device).scale
        return gradient_stats.seen_by_all(needs, given.given, layout, scale, are_scaled=scaled)

    def _judge_and_clip(
        self, given: Gradients, scaled: bool, layout: Layout, scales: HostScales
    ) -> Verdict:
        assert self._clip_norm is not None
        scale = scales.scale if scaled else 1.0
        checks = self._rule.checks_gradients
        if self._rule.needs == Needs():
            norm = clipping.norm_of(given, layout)
            total = norm.item()
            if total < 0:
                return Verdict(True, empty=True)
            number = total / scale
            # A norm may overflow though no element does, and unscaling may overflow some.
            if math.isfinite(number) and number <= _LARGEST:
                # On the host from here on: a device is not waited for a second time.
                norm = torch.tensor(total, dtype=norm.dtype) / scale
                factor = clipping.coefficient(norm, self._clip_norm)
                divides = self._can_be_handed_a_divisor(given) and (
                    scale * max(number / self._clip_norm, 1.0) < _LARGEST / 2
                )
                divisor = self._clip_and_divide(given, factor, scale, divides)
                return Verdict(True, Seen(True), divisor=divisor)
        if checks:
            verdict = self._look(given, scaled, layout)
        else:
            verdict = self._divide_and_trust(given, scaled, layout, in_place=True)
        if verdict.applied:
            self._clip(given, layout)
        return verdict

    def _clip_and_divide(self, given: Gradients, factor: Any, scale: float, divides: bool) -> Any:
        """Multiplies gradients by a number that clips, and divides them by the scale.

        Returns what a fused optimizer has to divide by instead, or None.
        """
        if divides:
            return (scale / factor).to(given.device, torch.float32)
        for group in given.groups:
            if self._rule.powers_of_two:
                torch._foreach_mul_(group, (factor / scale).to(group[0].device))
            else:
                torch._foreach_div_(group, scale)
                torch._foreach_mul_(group, factor.to(group[0].device))
        return None

    def _clip(self, given: Gradients, layout: Layout) -> None:
        """Clips gradients that are divided already."""
        if not given.groups and not layout.ranks:
            return
        norm = clipping.norm_of(given, layout)
        if isinstance(self._scales, HostScales) and norm.isinf():
            norm = clipping.norm_of_large(given, layout)
        factor = clipping.coefficient(norm, self._clip_norm)
        for group in given.groups:
            torch._foreach_mul_(group, factor.to(group[0].device))

    # --- The device decides -------------------------------------------------------------------

    def _judge_on_device(
        self,
        given: Gradients,
        scaled: bool,
        layout: Layout,
        scales: DeviceScales,
        in_place: bool,
    ) -> Verdict:
        sizes = self._magnitudes(given, scaled, layout)
        if self._rule.checks_gradients:
            found = self._found(given, scaled).to(scales.home, copy=True)
            if layout.ranks:
                here = found + _FINITE if given.given else found
                answer = ranks.agreed(here, layout.ranks)
                # With a gradient of its own a process knows that there is one.
                if not given.given and answer.item() == _ABSENT:
                    return Verdict(True, empty=True)
                found = (answer == _NON_FINITE).to(found.dtype)
        else:
            self._divide_unlooked(given, scaled, in_place=True)
            found = torch.zeros((), device=scales.home)
        seen = gradient_stats.with_verdict(sizes or Seen(None), found == 0)
        if self._clip_norm is not None and not in_place:
            self._clip(given, layout)
        if self._can_be_handed_a_verdict(layout):
            return Verdict(None, seen, found)
        return Verdict(not found.item(), seen, found)

    def _can_be_handed_a_verdict(self, layout: Layout) -> bool:
        """Whether the optimizer inside can skip by itself; if not, the host reads the verdict.

        A fused SGD allocates its momentum before it looks, and would take what it finds there for
        momentum. So a parameter's first step is decided by the host.
        """
        inner = self.inner_optimizer
        if not handing.takes_scaling(inner):
            return False
        pairs = [(p, group) for group in inner.param_groups for p in group["params"]]
        stepped = {id(p) for p, _ in pairs if p.grad is not None}
        if not layout.started >= stepped:
            layout.started |= {id(p) for p, group in pairs if _has_state(inner, p, group)}
        return layout.started >= stepped


def _has_state(inner: Any, parameter: Any, group: dict[str, Any]) -> bool:
    # SGD without momentum keeps none.
    if group.get("momentum") == 0:
        return True
    state = inner.state.get(parameter)
    return bool(state) and state.get("momentum_buffer", state) is not None


def _told(found: Any, sizes: Seen) -> Verdict:
    """Brings a verdict and what else a rule sees to the host, all at once."""
    asked = [found, sizes.largest, *sizes.counts, sizes.elements]
    there = [number for number in asked if number is not None and torch.is_tensor(number)]
    told = torch.stack([number.to(found.device, torch.float32) for number in there]).cpu()
    numbers = iter(told)
    finite = next(numbers) == 0
    largest = None if sizes.largest is None else next(numbers)
    counts = tuple(next(numbers) for _ in sizes.counts)
    elements = None if sizes.elements is None else next(numbers)
    seen = gradient_stats.with_verdict(Seen(finite, largest, counts, elements), finite)
    return Verdict(bool(finite), seen._replace(finite=bool(finite)))

"""Whether gradients in float16 are those of the reference, and what the loss scale does to that.

float16 is coarse: a gradient in it is a little wrong at any scale. So the error without scaling is
compared with that at a good scale. What both have in common is rounding, which no scale mends; what
scaling takes away is the reason for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from lossscale.diagnostics.deviation import Deviation
from lossscale.diagnostics.json_forms import Conversion, JsonForm
from lossscale.diagnostics.powers import power_of_two
from lossscale.diagnostics.verdict import Judgement, Thresholds, Verdict, share


@dataclasses.dataclass(frozen=True)
class VariableFidelity:
    """One variable's gradient in float16 beside its reference.

    Attributes:
        name: The path of the variable.
        layer: The path of its layer.
        at: What was found, by loss scale: without scaling (1.0), at the scale recommended, at the
            one in use, at the highest one. The highest may be of the first batch alone.
    """

    name: str
    layer: str
    at: Mapping[float, Deviation]


@dataclasses.dataclass(frozen=True)
class JudgedVariable(VariableFidelity):
    """A variable, and what its gradient needs.

    Attributes:
        verdict: The verdict on this variable.
        reason: Why, in a sentence.
        has_say: Whether it counts in the verdict on the model. One whose gradient is zero, is
            negligible beside its layer's others, or is rounding noise at every scale, does not.
    """

    verdict: Verdict
    reason: str
    has_say: bool

    @property
    def unscaled(self) -> Deviation:
        """What was found without scaling."""
        return self.at[1.0]


@dataclasses.dataclass(frozen=True)
class LayerFidelity:
    """The variables of one layer.

    Attributes:
        name: The path of the layer.
        variables: Its variables, the worst first.
    """

    name: str
    variables: tuple[JudgedVariable, ...]

    @property
    def verdict(self) -> Verdict:
        """That of its worst variable."""
        return self.variables[0].verdict

    def at(self, scale: float) -> Deviation:
        """Returns what was found of all its variables together at a scale.

        Args:
            scale: One of the scales that were measured.
        """
        return Deviation.total(variable.at[scale] for variable in self.variables)


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """The gradients of a model in float16 beside their reference, at a few loss scales.

    Attributes:
        variables: The variables in the order of the model.
        good: The loss scale that served best: one in the middle of those that do. None if there
            is no scale at which all gradients are finite.
        lowest: The smallest power of two, from 1 up, that mends what scaling can mend.
        highest: The largest power of two at which all gradients are finite.
        in_use: The scale of the model's optimizer, None if it has none.
        too_large: Names of the variables that overflow at twice the highest scale.
        reference_scale: The loss scale of the reference, 1.0 but for a model that computes in
            float16 by itself: no dtype policy takes that away, only a high scale does.
        batches: On how many batches it was measured.
        runs: How many times gradients were computed for it, in float32 and in float16.
        missing: Why nothing could be measured; empty if it was.
        setting: How float16 was computed in, if not by the dtype policy of each layer.
    """

    variables: tuple[VariableFidelity, ...] = ()
    good: float | None = None
    lowest: float | None = None
    highest: float | None = None
    in_use: float | None = None
    too_large: tuple[str, ...] = ()
    reference_scale: float = 1.0
    batches: int = 0
    runs: int = 0
    missing: str = ""
    setting: str = ""

    def judged(self, thresholds: Thresholds | None = None) -> tuple[JudgedVariable, ...]:
        """Returns the variables with their verdicts, the worst first.

        Args:
            thresholds: Where the verdicts begin; None for the defaults.
        """
        return _Judge(self, thresholds or Thresholds()).variables

    def layers(self, thresholds: Thresholds | None = None) -> tuple[LayerFidelity, ...]:
        """Returns the layers, the worst first.

        Args:
            thresholds: Where the verdicts begin; None for the defaults.
        """
        by_layer: dict[str, list[JudgedVariable]] = {}
        for variable in self.judged(thresholds):
            by_layer.setdefault(variable.layer, []).append(variable)
        return tuple(LayerFidelity(name, tuple(found)) for name, found in by_layer.items())

    def judge(self, thresholds: Thresholds | None = None) -> Judgement:
        """Returns whether loss scaling is needed, and why in a sentence.

        Args:
            thresholds: Where the verdicts begin; None for the defaults.
        """
        return _Judge(self, thresholds or Thresholds()).judgement

    def to_dict(self) -> dict[str, Any]:
        """Returns it as a dictionary of lists, texts and numbers."""
        return _FORM.write(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Fidelity:
        """Returns what `to_dict` has described.

        Raises:
            ArgumentError: If it is no such dictionary. It is a `ValueError`.
        """
        return _FORM.read(found)


def _variables_written(variables: Iterable[VariableFidelity]) -> list[dict[str, Any]]:
    return [
        {
            "name": variable.name,
            "layer": variable.layer,
            # With the shares, for other programs; they are not read.
            "at": [
                {"scale": scale, **found._asdict(), **_shares(found)}
                for scale, found in variable.at.items()
            ],
        }
        for variable in variables
    ]


def _variables_read(found: Iterable[Any]) -> tuple[VariableFidelity, ...]:
    try:
        return tuple(
            VariableFidelity(
                each["name"],
                each["layer"],
                {
                    float(at["scale"]): Deviation(**{n: at[n] for n in Deviation._fields})
                    for at in each["at"]
                },
            )
            for each in found
        )
    except KeyError as error:
        raise ValueError(f"a variable without {error}") from None


_FORM = JsonForm(
    cls=Fidelity,
    what="the fidelity of a report",
    subject="`fidelity` of a report",
    conversions={
        "variables": Conversion(_variables_written, _variables_read),
        "too_large": Conversion(list, tuple),
    },
    newer=frozenset({"setting"}),
)


class _Judge:
    """The verdicts on one measurement."""

    def __init__(self, fidelity: Fidelity, limits: Thresholds) -> None:
        self._fidelity, self._limits = fidelity, limits

    @cached_property
    def variables(self) -> tuple[JudgedVariable, ...]:
        if self._fidelity.missing:
            return ()
        largest: dict[str, float] = {}
        for variable in self._fidelity.variables:
            amax = variable.at[1.0].largest
            largest[variable.layer] = max(largest.get(variable.layer, 0.0), amax)
        judged = []
        for variable in self._fidelity.variables:
            limit = self._limits.negligible * largest[variable.layer]
            verdict, reason, has_say = self._judge(variable, limit)
            judged.append(
                JudgedVariable(variable.name, variable.layer, variable.at, verdict, reason, has_say)
            )
        judged.sort(key=self._badness, reverse=True)
        return tuple(judged)

    def _badness(self, variable: JudgedVariable) -> tuple[float, ...]:
        found = variable.unscaled
        return (
            variable.has_say,
            variable.verdict.severity,
            found.nonfinite > 0,
            found.lost,
            found.error,
        )

    def _judge(self, variable: VariableFidelity, negligible: float) -> tuple[Verdict, str, bool]:
        one, limits, good = variable.at[1.0], self._limits, self._fidelity.good
        if one.reference_nonfinite:
            why = (
                f"{one.reference_nonfinite:,} of {one.elements:,} elements are infinite or NaN in "
                "float32, before any scaling."
            )
            return Verdict.UNKNOWN, why, True
        if not one.mass and not one.nonfinite:
            return Verdict.UNKNOWN, "It is zero.", False
        if one.largest < negligible:
            why = "It is negligible beside the other gradients of its layer."
            return Verdict.UNKNOWN, why, False
        if good is None or variable.at[good].nonfinite:
            why = f"{one.nonfinite:,} of {one.elements:,} elements are not finite at any scale."
            return Verdict.UNKNOWN, why, True
        best = variable.at[good]
        at_good = f"at a loss scale of {power_of_two(good)}"
        if one.nonfinite:
            why = (
                f"{one.nonfinite:,} of {one.elements:,} elements overflow without scaling, and "
                f"none {at_good}."
            )
            return Verdict.REQUIRED, why, True
        kept = self._still_lost(variable)
        if kept:
            return Verdict.INSUFFICIENT, kept, True
        noise = min(one.error, best.error)
        if noise >= limits.noise:
            why = (
                f"float16's rounding alone is a relative error of {_percent(noise)}, at any scale."
            )
            return Verdict.UNKNOWN, why, False
        lost, error = one.lost - min(one.lost, best.lost), one.error - noise
        why = _beside(one, best, good)
        if lost <= limits.lost and error <= max(limits.error, noise):
            return Verdict.NOT_NEEDED, why, True
        # A single gradient may be quite wrong, and the model learns nevertheless; not so one of
        # which next to nothing is left.
        required = lost >= limits.required_lost
        return (Verdict.REQUIRED if required else Verdict.RECOMMENDED), why, True

    def _still_lost(self, variable: VariableFidelity) -> str:
        """What the highest single scale costs a variable; empty if next to nothing."""
        highest = self._fidelity.highest
        if highest is None or highest not in variable.at:
            return ""
        top, limits = variable.at[highest], self._limits
        below = variable.at.get(highest / BELOW)
        if top.lost < limits.insufficient_lost and top.error < limits.insufficient_error:
            return ""
        falls = below is not None and (
            below.lost - top.lost > limits.lost
            or (below.error - top.error > limits.error and top.lost > limits.lost)
        )
        # What neither falls as the scale rises nor is zero was not lost by being small.
        if not falls and top.lost < limits.noise:
            return ""
        return f"Even at {power_of_two(highest)}, the highest loss scale, {_described(top)}."

    @cached_property
    def judgement(self) -> Judgement:
        fidelity = self._fidelity
        if fidelity.missing:
            return Judgement(Verdict.UNKNOWN, fidelity.missing)
        found = [variable for variable in self.variables if variable.has_say]
        if not found:
            return Judgement(Verdict.UNKNOWN, "No variable has a gradient to speak of in float16.")
        unknown = [variable for variable in found if variable.verdict is Verdict.UNKNOWN]
        if unknown:
            first = unknown[0]
            return Judgement(
                Verdict.UNKNOWN,
                f"The gradient of {first.name}: {first.reason} "
                + (
                    "The model or its data are at fault, which no loss scale mends."
                    if first.unscaled.reference_nonfinite
                    else "float16 overflows on the way forward, which no loss scale mends: keep "
                    "the layer in which it does in float32."
                ),
            )
        worst = found[0]
        where = f"that of {worst.name}"
        if worst.verdict is Verdict.NOT_NEEDED:
            return Judgement(
                Verdict.NOT_NEEDED,
                f"In float16 no gradient gets better by scaling; of {where}, the worst, "
                f"{worst.reason}",
            )
        if worst.verdict is Verdict.RECOMMENDED:
            together = self._wrong_together(found)
            if together:
                return Judgement(Verdict.REQUIRED, f"{together} The worst is {where}.")
        if worst.verdict is not Verdict.INSUFFICIENT:
            return Judgement(worst.verdict, f"The gradient of {worst.name}: {worst.reason}")
        costs = [each.name for each in found if each.verdict is Verdict.INSUFFICIENT]
        above = ", ".join(fidelity.too_large[:3])
        return Judgement(
            Verdict.INSUFFICIENT,
            f"No single scale serves all gradients. {worst.reason[:-1]}, in {worst.name}"
            + (f" and {len(costs) - 1} more" if len(costs) > 1 else "")
            + (f"; above it {above} overflow" if above else "")
            + ". Keep these layers in float32, or use bfloat16.",
        )

    def _wrong_together(self, found: Sequence[JudgedVariable]) -> str:
        """What all gradients together lose without scaling; empty if less than is required."""
        good = self._fidelity.good
        if good is None:
            return ""
        one = Deviation.total(variable.unscaled for variable in found)
        best = Deviation.total(variable.at[good] for variable in found)
        if one.error - min(one.error, best.error) < self._limits.required_error:
            return ""
        return f"All gradients together: {_beside(one, best, good)}"


BELOW = 8.0
"""How far below the highest scale it is looked whether the loss still falls as the scale rises."""


def _shares(found: Deviation) -> dict[str, float]:
    return {"lost": found.lost, "error": found.error, "cosine": found.cosine}


def _described(found: Deviation) -> str:
    return (
        f"{share(found.lost)} of the sum of |x| is lost to zero and the relative error is "
        f"{_percent(found.error)}"
    )


def _beside(one: Deviation, best: Deviation, good: float) -> str:
    return (
        f"without scaling {_described(one)}, at a loss scale of {power_of_two(good)} "
        f"{share(best.lost)} and {_percent(best.error)}."
    )


def _percent(error: float) -> str:
    return f"{100 * error:.3g} %" if math.isfinite(error) else "more than can be told"

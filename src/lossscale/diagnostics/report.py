"""What was found about the gradients of a model: tensor by tensor, layer by layer, as a whole."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.histogram import GradientHistogram, middle_scale
from lossscale.diagnostics.json_forms import Conversion, FormatVersion, JsonForm, json_text
from lossscale.diagnostics.powers import power_of_two
from lossscale.diagnostics.verdict import Judgement, Thresholds, Verdict, judge, share


class TensorKind(enum.StrEnum):
    """What a gradient is taken with respect to."""

    OUTPUT = "output"
    """What the model returns; or what goes into its last activation function, such as logits."""

    ACTIVATION = "activation"
    """What a layer inside the model returns."""

    VARIABLE = "variable"
    """A trainable variable."""


@dataclasses.dataclass(frozen=True)
class TensorRange:
    """The gradient of the loss with respect to one tensor, over all batches.

    Attributes:
        name: The path of the variable; "output:" or "activation:" and the path of the layer.
        layer: The path of the layer it belongs to.
        kind: What the tensor is.
        histogram: The elements of the gradient without scaling, of all batches together.
    """

    name: str
    layer: str
    kind: TensorKind
    histogram: GradientHistogram


@dataclasses.dataclass(frozen=True)
class JudgedTensor(TensorRange):
    """A tensor, and what its gradient needs in a number format.

    Attributes:
        format: The name of the format.
        verdict: The verdict on this gradient alone.
        reason: Why, in a sentence.
        weight: The verdict that it contributes to the one on the model. A gradient inside the model
            contributes RECOMMENDED at most: whether its loss does harm shows in the variables. One
            that is zero, or negligible beside its layer's others, contributes UNKNOWN.
    """

    format: str
    verdict: Verdict
    reason: str
    weight: Verdict

    @property
    def flushed_mass(self) -> float:
        """The share of its sum of |x| that becomes zero without scaling, from 0 to 1."""
        return self.histogram.flushed_mass(self.format)


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """The gradients that belong to one layer.

    Attributes:
        name: The path of the layer.
        tensors: Its output and its variables, the worst first.
    """

    name: str
    tensors: tuple[JudgedTensor, ...]

    @property
    def histogram(self) -> GradientHistogram:
        """The gradients of its variables together."""
        return _merged(self.tensors, {TensorKind.VARIABLE})

    @property
    def worst(self) -> JudgedTensor:
        """The tensor that decides its verdict."""
        return self.tensors[0]

    @property
    def verdict(self) -> Verdict:
        """What it contributes to the verdict on the model."""
        return self.worst.weight


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """Whether a model needs loss scaling, and what its gradients look like.

    Attributes:
        model: The name of the model.
        framework: What it computes with, such as "Keras on jax".
        policy: The dtype policy of the model.
        measured_in: The dtype that the gradients were computed in.
        batches: How many batches they are from.
        samples: How many samples those have together.
        ranges: The gradients, in the order of the model.
        blind: Names of tensors whose gradients came in a narrow format nevertheless, in which what
            was flushed cannot be seen. If there is one, the verdict is UNKNOWN.
        format: The name of the number format that the verdict is about.
        thresholds: Where the verdicts begin.
    """

    model: str
    framework: str
    policy: str
    measured_in: str
    batches: int
    samples: int
    ranges: tuple[TensorRange, ...]
    blind: tuple[str, ...] = ()
    format: str = "float16"
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        number_format(self.format)

    def with_format(
        self, format: str | NumberFormat, thresholds: Thresholds | None = None
    ) -> GradientReport:
        """Returns the report for another number format, from the same measurement.

        Args:
            format: A key of `FORMATS`.
            thresholds: Where the verdicts begin; None for those of this report.

        Raises:
            ArgumentError: If the format is not known. It is a `ValueError`.

        Example:
            >>> report = GradientReport("m", "keras", "float32", "float32", 1, 1, ())
            >>> report.with_format("bfloat16").format
            'bfloat16'
        """
        return dataclasses.replace(
            self,
            format=number_format(format).name,
            thresholds=self.thresholds if thresholds is None else thresholds,
        )

    @cached_property
    def tensors(self) -> tuple[JudgedTensor, ...]:
        """The gradients with their verdicts, the worst first."""
        largest: dict[str, float] = {}
        for tensor in self.ranges:
            if tensor.kind is TensorKind.VARIABLE:
                amax = tensor.histogram.amax
                largest[tensor.layer] = max(largest.get(tensor.layer, 0.0), amax)
        judged = []
        for tensor in self.ranges:
            verdict, reason = judge(tensor.histogram, self.format, self.thresholds)
            weight = verdict
            if tensor.kind is TensorKind.ACTIVATION and verdict.severity > _RECOMMENDED:
                weight = Verdict.RECOMMENDED
            limit = self.thresholds.negligible * largest.get(tensor.layer, 0.0)
            if tensor.kind is TensorKind.VARIABLE and tensor.histogram.amax < limit:
                weight = Verdict.UNKNOWN
            fields = {field.name: getattr(tensor, field.name) for field in _RANGE_FIELDS}
            judged.append(
                JudgedTensor(
                    **fields, format=self.format, verdict=verdict, reason=reason, weight=weight
                )
            )
        judged.sort(key=_badness, reverse=True)
        return tuple(judged)

    @property
    def layers(self) -> tuple[LayerRange, ...]:
        """The layers with their gradients, the worst first."""
        by_layer: dict[str, list[JudgedTensor]] = {}
        for tensor in self.tensors:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        return tuple(LayerRange(name, tuple(tensors)) for name, tensors in by_layer.items())

    @property
    def total(self) -> GradientHistogram:
        """The gradients of all variables together."""
        return _merged(self.ranges, {TensorKind.VARIABLE})

    @property
    def worst(self) -> JudgedTensor | None:
        """The gradient that decides the verdict; None if there is none."""
        return self.tensors[0] if self.tensors else None

    @property
    def verdict(self) -> Verdict:
        """Whether the model needs loss scaling."""
        return self._judgement.verdict

    @property
    def reason(self) -> str:
        """Why, in a sentence or two."""
        return self._judgement.reason

    @cached_property
    def suitable_scales(self) -> tuple[float, float]:
        """The smallest and the largest power of two that suit every gradient that has a say.

        If the first is above the second, no scale does. (0.0, inf) if all gradients are zero.
        """
        pairs = [
            (tensor, *self.thresholds.scales(tensor.histogram, self.format))
            for tensor in self.tensors
            if tensor.histogram.bins
        ]
        highest = min((high for _, _, high in pairs), default=math.inf)
        lowest = [
            low
            for tensor, low, _ in pairs
            if tensor.weight is not Verdict.UNKNOWN
            # What cannot be saved inside the model is no reason to do nothing.
            and not (tensor.kind is TensorKind.ACTIVATION and low > highest)
        ]
        return max(lowest, default=0.0), highest

    @cached_property
    def recommended_scale(self) -> float | None:
        """The fixed loss scale to train with, a power of two: the middle of the suitable ones.

        1.0 if loss scaling is not needed; None if it is not known whether it is, or if no scale
        suits. In the middle it leaves room on both sides, because gradients change as a network
        learns.
        """
        if self.verdict in (Verdict.UNKNOWN, Verdict.INSUFFICIENT):
            return None
        return 1.0 if self.verdict is Verdict.NOT_NEEDED else middle_scale(*self.suitable_scales)

    @cached_property
    def _judgement(self) -> Judgement:
        if self.blind:
            return Judgement(
                Verdict.UNKNOWN,
                f"The gradient of {_listed(self.blind)} is computed in float16 or bfloat16 "
                "whatever the dtype policy says, and such a gradient cannot show what it lost. "
                "Leave the casts in the model to its policy and ask again.",
            )
        for tensor in self.tensors:
            if tensor.histogram.infs or tensor.histogram.nans:
                return Judgement(Verdict.UNKNOWN, f"The gradient of {tensor.name}: {tensor.reason}")
        decisive = self.worst
        if decisive is None or decisive.weight is Verdict.UNKNOWN:
            return Judgement(Verdict.UNKNOWN, "Every gradient is zero.")
        if decisive.weight is Verdict.NOT_NEEDED:
            which = (
                "The one that loses the most is"
                if decisive.flushed_mass
                else "None loses anything. The one with the least room is"
            )
            return Judgement(
                Verdict.NOT_NEEDED,
                f"The gradients fit into {self.format} as they are. {which} that of "
                f"{decisive.name}: {decisive.reason}",
            )
        lowest, highest = self.suitable_scales
        reason = f"The gradient of {decisive.name}: {decisive.reason}"
        if lowest <= highest:
            return Judgement(decisive.weight, reason)
        return Judgement(
            Verdict.INSUFFICIENT,
            f"{reason} No scale suits all gradients: the smallest need {power_of_two(lowest)} or "
            f"more, the largest {power_of_two(highest)} or less. A scale for each layer, or a "
            "format with a wider range such as bfloat16, would.",
        )

    def to_text(self, rows: int | None = 20) -> str:
        """Returns the report as lines of text, the worst gradients first.

        Args:
            rows: How many gradients to list at most; None for all.

        Example:
            >>> report = GradientReport("m", "keras", "float32", "float32", 1, 1, ())
            >>> print(report.to_text())
            Loss scaling for m in float16: unknown.
            Every gradient is zero.
            ...
        """
        lines = [f"Loss scaling for {self.model} in {self.format}: {self.verdict}.", self.reason]
        lines += self.advice
        shown = self.tensors if rows is None else self.tensors[:rows]
        if shown:
            lines += ["", *_table(self.columns, [self.cells(tensor) for tensor in shown])]
        if len(shown) < len(self.tensors):
            lines.append(f"... and {len(self.tensors) - len(shown)} more that lose less")
        return "\n".join([*lines, "", *self.footnotes])

    def __str__(self) -> str:
        return self.to_text()

    @property
    def advice(self) -> list[str]:
        """What to do, as sentences."""
        scale = self.recommended_scale
        if scale is None or self.verdict is Verdict.NOT_NEEDED:
            return []
        lowest, highest = self.suitable_scales
        advice = [
            f"Train with a dynamic scale, or with a fixed one: FixedScale({power_of_two(scale)}). "
            f"Any power of two from {power_of_two(lowest)} to {power_of_two(highest)} serves."
        ]
        if scale < 1:
            advice.append(
                "A dynamic scale must be let go so low: DynamicScale(initial_scale="
                f"{power_of_two(scale)}, min_scale={power_of_two(scale / 2**10)})."
            )
        return advice

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `cells`."""
        scale = self.recommended_scale
        at_scale = () if scale in (None, 1.0) else (f"lost at {power_of_two(scale)}",)
        return ("gradient of", "elements", "largest", "lost unscaled", *at_scale, "verdict")

    def cells(self, tensor: JudgedTensor) -> tuple[str, ...]:
        """Returns the row of a table: what is to be known about one gradient, as texts.

        Args:
            tensor: One of `tensors`.
        """
        histogram, scale = tensor.histogram, self.recommended_scale
        at_scale: tuple[str, ...] = ()
        if scale not in (None, 1.0):
            at_scale = (share(histogram.flushed_mass(self.format, scale)),)
        largest = f"2**{math.log2(histogram.amax):.1f}" if histogram.bins else "0"
        if histogram.infs or histogram.nans:
            largest = "not finite"
        verdict = str(tensor.verdict)
        if tensor.weight is not tensor.verdict:
            verdict = "negligible" if tensor.weight is Verdict.UNKNOWN else f"{verdict} (*)"
        return (
            tensor.name,
            f"{histogram.size // max(self.batches, 1):,}",
            largest,
            share(tensor.flushed_mass),
            *at_scale,
            verdict,
        )

    @property
    def footnotes(self) -> list[str]:
        """How it was measured, as sentences."""
        notes = [
            "Lost is the share of the sum of |x| that rounding to "
            f"{self.format} turns into zero. Elements are those of one batch."
        ]
        shown = {self.cells(tensor)[-1].removesuffix(" (*)") for tensor in self.tensors}
        if any(self.cells(tensor)[-1].endswith("(*)") for tensor in self.tensors):
            notes.append("(*) inside the model, where it counts as a recommendation at most.")
        if "negligible" in shown:
            notes.append(
                "Negligible: so small beside the gradients of the same layer that it may be made "
                "of rounding errors, as that of a bias in front of a normalization is."
            )
        how = (
            f"Measured in {self.measured_in} on {_counted(self.batches, 'batch', 'batches')} "
            f"({_counted(self.samples, 'sample', 'samples')}), with {self.framework}."
        )
        if self.policy != self.measured_in:
            how += (
                f" The model's dtype policy is {self.policy}, in which a gradient without scaling "
                "cannot show what it lost."
            )
        notes.append(how)
        if self.format == "float8_e4m3fn":
            notes.append(
                "float8_e4m3fn has no infinity, and often overflow is cut off at its largest "
                "number. A dynamic scale that waits for infinities then grows without end."
            )
        return notes

    def to_json(self) -> str:
        """Returns the report as JSON; `from_json` gives back an equal one.

        What follows from the measurement, such as the verdict and its reason, is written too, for
        other programs, and not read.
        """
        return json_text(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Returns what `to_json` writes, as a dictionary of lists, texts and numbers."""
        lowest, highest = self.suitable_scales
        verdicts = {tensor.name: tensor.verdict for tensor in self.tensors}
        return {
            "lossscale_report": _FORMAT.number,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "recommended_scale": self.recommended_scale,
            "suitable_scales": [lowest, highest] if 0 < lowest <= highest < math.inf else None,
            "worst": self.worst.name if self.worst else None,
            **_FORM.write(self),
            "ranges": [
                {**_RANGE_FORM.write(tensor), "verdict": str(verdicts[tensor.name])}
                for tensor in self.ranges
            ],
        }

    @classmethod
    def from_json(cls, text: str) -> GradientReport:
        """Returns the report that `to_json` wrote.

        Raises:
            ArgumentError: If the text is none. It is a `ValueError`.

        Example:
            >>> report = GradientReport("m", "keras", "float32", "float32", 1, 1, ())
            >>> GradientReport.from_json(report.to_json()) == report
            True
        """
        return _FORM.from_text(text)


_FORMAT = FormatVersion("lossscale_report", 1, begins="the JSON of a report is")
_RANGE_FIELDS = dataclasses.fields(TensorRange)
_RANGE_FORM = JsonForm(
    cls=TensorRange,
    what="a gradient of a report",
    subject="each of `ranges`",
    conversions={
        "kind": Conversion(str, TensorKind),
        "histogram": Conversion(GradientHistogram.to_dict, GradientHistogram.from_dict),
    },
    ignores=True,
)
_FORM = JsonForm(
    cls=GradientReport,
    what="a report",
    subject="the JSON of a report",
    conversions={
        "ranges": Conversion(
            lambda ranges: [_RANGE_FORM.write(tensor) for tensor in ranges],
            lambda ranges: tuple(_RANGE_FORM.read(tensor) for tensor in ranges),
        ),
        "blind": Conversion(list, tuple),
        "thresholds": Conversion(dataclasses.asdict, lambda found: Thresholds(**found)),
    },
    version=_FORMAT,
    ignores=True,
)
_RECOMMENDED = Verdict.RECOMMENDED.severity


def _badness(tensor: JudgedTensor) -> tuple[float, ...]:
    # Among those that call for scaling, what happens next to the loss comes first: all other
    # gradients are computed from it.
    at_loss = tensor.kind is TensorKind.OUTPUT and tensor.weight.severity >= _RECOMMENDED
    outside = tensor.kind is not TensorKind.ACTIVATION
    headroom = tensor.histogram.headroom_bits(tensor.format)
    return tensor.weight.severity, at_loss, outside, tensor.flushed_mass, -headroom


def _merged(tensors: Iterable[TensorRange], kinds: set[TensorKind]) -> GradientHistogram:
    return GradientHistogram.merge(t.histogram for t in tensors if t.kind in kinds)


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    last = len(headings) - 1

    def line(cells: Sequence[str]) -> str:
        # Names and verdicts are words, in between are numbers.
        aligned = [
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(aligned).rstrip()

    return [line(headings), *(line(row) for row in rows)]

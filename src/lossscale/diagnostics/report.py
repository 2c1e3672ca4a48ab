"""What was found about the gradients of a model: tensor by tensor, and as a whole."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

from lossscale.diagnostics import report_text
from lossscale.diagnostics.fidelity import Fidelity, JudgedVariable, LayerFidelity
from lossscale.diagnostics.format_fit import middle_scale
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.json_forms import Conversion, FormatVersion, JsonForm, json_text
from lossscale.diagnostics.powers import power_of_two
from lossscale.diagnostics.tensor_ranges import (
    JudgedTensor,
    LayerRange,
    TensorKind,
    TensorRange,
    merged,
)
from lossscale.diagnostics.verdict import Judgement, Thresholds, Verdict, judge


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
        fidelity: What float16 made of the gradients, on which the verdict rests; None if it was not
            measured. Then the verdict is a prediction from `ranges`.
        untapped: Layers that what happens inside of has no row in `ranges`.
        caveats: What was not measured as it is trained, as sentences.
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
    fidelity: Fidelity | None = None
    untapped: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

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
        return merged(self.ranges, {TensorKind.VARIABLE})

    @property
    def worst(self) -> JudgedTensor | None:
        """The gradient that decides the verdict; None if there is none."""
        return self.tensors[0] if self.tensors else None

    @property
    def verdict(self) -> Verdict:
        """Whether the model needs loss scaling: as measured in float16, else as predicted."""
        return self._judgement.verdict

    @property
    def reason(self) -> str:
        """Why, in a sentence or two."""
        return self._judgement.reason

    @property
    def measured_variables(self) -> tuple[JudgedVariable, ...]:
        """What float16 made of the gradient of each variable, the worst first.

        Empty if it was not measured, or `format` is another one.
        """
        fidelity = self._measured
        return () if fidelity is None else fidelity.judged(self.thresholds)

    @property
    def measured_layers(self) -> tuple[LayerFidelity, ...]:
        """The same, layer by layer."""
        fidelity = self._measured
        return () if fidelity is None else fidelity.layers(self.thresholds)

    @property
    def _measured(self) -> Fidelity | None:
        return self.fidelity if self.format == "float16" else None

    @cached_property
    def _judgement(self) -> Judgement:
        fidelity = self._measured
        return self.prediction if fidelity is None else fidelity.judge(self.thresholds)

    @cached_property
    def suitable_scales(self) -> tuple[float, float]:
        """The smallest and the largest power of two that suit every gradient that has a say.

        If the first is above the second, no scale does. (0.0, inf) if all gradients are zero. They
        are those that were measured, with room above them; else they follow from `ranges`.
        """
        measured = self._measured
        if measured is not None and measured.lowest and measured.highest:
            room = 2.0 ** math.ceil(self.thresholds.room)
            return measured.lowest, max(measured.lowest, measured.highest / room)
        return self.predicted_scales

    @cached_property
    def predicted_scales(self) -> tuple[float, float]:
        """The suitable scales as they follow from `ranges`."""
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
        if self.verdict is Verdict.NOT_NEEDED:
            return 1.0
        if self._measured is not None:
            return self._measured.good
        return middle_scale(*self.suitable_scales)

    @cached_property
    def prediction(self) -> Judgement:
        """The verdict that follows from `ranges`: from what rounding would take away."""
        if self.blind:
            return Judgement(
                Verdict.UNKNOWN,
                f"The gradient of {report_text.listed(self.blind)} is computed in float16 or "
                "bfloat16 whatever the dtype policy says, and such a gradient cannot show what it "
                "lost. Leave the casts in the model to its policy and ask again.",
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
        lowest, highest = self.predicted_scales
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
        return "\n".join(report_text.lines_of(self, rows))

    def __str__(self) -> str:
        return self.to_text()

    @property
    def advice(self) -> list[str]:
        """What to do, as sentences."""
        return report_text.advice(self)

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `cells`."""
        return report_text.columns(self)

    def cells(self, tensor: JudgedTensor) -> tuple[str, ...]:
        """Returns the row of a table: what is to be known about one gradient, as texts.

        Args:
            tensor: One of `tensors`.
        """
        return report_text.cells(self, tensor)

    @property
    def footnotes(self) -> list[str]:
        """How it was measured, as sentences."""
        return report_text.footnotes(self)

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
            "prediction": {
                "verdict": str(self.prediction.verdict),
                "reason": self.prediction.reason,
            },
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
        "fidelity": Conversion(
            lambda found: None if found is None else found.to_dict(),
            lambda found: None if found is None else Fidelity.from_dict(found),
        ),
        "untapped": Conversion(list, tuple),
        "caveats": Conversion(list, tuple),
    },
    newer=frozenset({"fidelity", "untapped", "caveats"}),
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

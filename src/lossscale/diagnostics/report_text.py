"""A report in words: what to do, a table of the gradients, and how they were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lossscale.diagnostics.powers import power_of_two
from lossscale.diagnostics.tensor_ranges import JudgedTensor
from lossscale.diagnostics.verdict import Verdict, share

if TYPE_CHECKING:
    from lossscale.diagnostics.report import GradientReport


def text(report: GradientReport, rows: int | None) -> str:
    """Returns the lines of `GradientReport.to_text`."""
    lines = [
        f"Loss scaling for {report.model} in {report.format}: {report.verdict}.",
        report.reason,
    ]
    lines += advice(report)
    shown = report.tensors if rows is None else report.tensors[:rows]
    if shown:
        lines += ["", *_table(columns(report), [cells(report, tensor) for tensor in shown])]
    if len(shown) < len(report.tensors):
        lines.append(f"... and {len(report.tensors) - len(shown)} more that lose less")
    return "\n".join([*lines, "", *footnotes(report)])


def advice(report: GradientReport) -> list[str]:
    """Returns what to do, as sentences."""
    scale = report.recommended_scale
    if scale is None or report.verdict is Verdict.NOT_NEEDED:
        return []
    lowest, highest = report.suitable_scales
    found = [
        f"Train with a dynamic scale, or with a fixed one: FixedScale({power_of_two(scale)}). "
        f"Any power of two from {power_of_two(lowest)} to {power_of_two(highest)} serves."
    ]
    if scale < 1:
        found.append(
            "A dynamic scale must be let go so low: DynamicScale(initial_scale="
            f"{power_of_two(scale)}, min_scale={power_of_two(scale / 2**10)})."
        )
    return found


def columns(report: GradientReport) -> tuple[str, ...]:
    """Returns the headings of the table."""
    scale = report.recommended_scale
    at_scale = () if scale in (None, 1.0) else (f"lost at {power_of_two(scale)}",)
    return ("gradient of", "elements", "largest", "lost unscaled", *at_scale, "verdict")


def cells(report: GradientReport, tensor: JudgedTensor) -> tuple[str, ...]:
    """Returns a row of the table."""
    histogram, scale = tensor.histogram, report.recommended_scale
    at_scale: tuple[str, ...] = ()
    if scale not in (None, 1.0):
        at_scale = (share(histogram.flushed_mass(report.format, scale)),)
    largest = f"2**{math.log2(histogram.amax):.1f}" if histogram.bins else "0"
    if histogram.infs or histogram.nans:
        largest = "not finite"
    verdict = str(tensor.verdict)
    if tensor.weight is not tensor.verdict:
        verdict = "negligible" if tensor.weight is Verdict.UNKNOWN else f"{verdict} (*)"
    return (
        tensor.name,
        f"{histogram.size // max(report.batches, 1):,}",
        largest,
        share(tensor.flushed_mass),
        *at_scale,
        verdict,
    )


def footnotes(report: GradientReport) -> list[str]:
    """Returns how it was measured, as sentences."""
    notes = [
        "Lost is the share of the sum of |x| that rounding to "
        f"{report.format} turns into zero. Elements are those of one batch."
    ]
    shown = {cells(report, tensor)[-1].removesuffix(" (*)") for tensor in report.tensors}
    if any(cells(report, tensor)[-1].endswith("(*)") for tensor in report.tensors):
        notes.append("(*) inside the model, where it counts as a recommendation at most.")
    if "negligible" in shown:
        notes.append(
            "Negligible: so small beside the gradients of the same layer that it may be made "
            "of rounding errors, as that of a bias in front of a normalization is."
        )
    how = (
        f"Measured in {report.measured_in} on {_counted(report.batches, 'batch', 'batches')} "
        f"({_counted(report.samples, 'sample', 'samples')}), with {report.framework}."
    )
    if report.policy != report.measured_in:
        how += (
            f" The model's dtype policy is {report.policy}, in which a gradient without scaling "
            "cannot show what it lost."
        )
    notes.append(how)
    if report.format == "float8_e4m3fn":
        notes.append(
            "float8_e4m3fn has no infinity, and often overflow is cut off at its largest "
            "number. A dynamic scale that waits for infinities then grows without end."
        )
    return notes


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


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

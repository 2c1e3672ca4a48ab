"""A report on gradients as lines of text, and the cells of its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lossscale.diagnostics.fidelity import JudgedVariable
from lossscale.diagnostics.powers import power_of_two
from lossscale.diagnostics.verdict import Verdict, share

if TYPE_CHECKING:
    from lossscale.diagnostics.report import GradientReport
    from lossscale.diagnostics.tensor_ranges import JudgedTensor


def lines_of(report: GradientReport, rows: int | None) -> Iterator[str]:
    """Yields the lines of a report.

    Args:
        report: The report.
        rows: How many gradients each table lists at most; None for all.
    """
    yield f"Loss scaling for {report.model} in {report.format}: {report.verdict}."
    yield report.reason
    yield from report.advice
    measured = report.measured_variables
    if measured:
        yield from ("", "What float16 made of the gradients:")
        yield from _shortened(
            fidelity_columns(report), (fidelity_cells(report, each) for each in measured), rows
        )
        yield from ("", "Where it comes from, measured in float32 and rounded to float16:")
    elif report.tensors:
        yield ""
    yield from _shortened(report.columns, (report.cells(tensor) for tensor in report.tensors), rows)
    yield from ("", *report.footnotes)


def _shortened(
    headings: Sequence[str], cells: Iterable[Sequence[str]], rows: int | None
) -> Iterator[str]:
    found = list(cells)
    shown = found if rows is None else found[:rows]
    if shown:
        yield from _table(headings, shown)
    if len(shown) < len(found):
        yield f"... and {len(found) - len(shown)} more that lose less"


# --- Fidelity ------------------------------------------------------------------------------------


def reported_scales(report: GradientReport) -> dict[float, str]:
    """Returns the scales that fidelity is reported at, and what they are called in headings."""
    fidelity = report.fidelity
    if fidelity is None or fidelity.missing:
        return {}
    scales = {1.0: "unscaled"}
    if fidelity.good is not None:
        scales.setdefault(fidelity.good, f"at {power_of_two(fidelity.good)}")
    if fidelity.in_use is not None:
        known = scales.get(fidelity.in_use, f"at {power_of_two(fidelity.in_use)}")
        scales[fidelity.in_use] = f"{known} (in use)"
    return scales


def fidelity_columns(report: GradientReport) -> tuple[str, ...]:
    """Returns the headings of `fidelity_cells`."""
    headings = ["gradient of"]
    for name in reported_scales(report).values():
        headings += [f"lost {name}", "error"]
    return (*headings, "cosine unscaled", "verdict")


def fidelity_cells(report: GradientReport, variable: JudgedVariable) -> tuple[str, ...]:
    """Returns the row of a table: what float16 made of one variable's gradient, as texts."""
    cells = [variable.name]
    for scale in reported_scales(report):
        found = variable.at[scale]
        if found.nonfinite:
            cells += [f"{found.nonfinite:,} not finite", "-"]
        else:
            cells += [share(found.lost), f"{100 * found.error:.3g} %"]
    verdict = str(variable.verdict) if variable.has_say else "no say (**)"
    return (*cells, f"{variable.unscaled.cosine:.4f}", verdict)


# --- The gradients on the way --------------------------------------------------------------------


def advice(report: GradientReport) -> list[str]:
    """Returns what to do, as sentences."""
    found = list(report.caveats)
    if report.untapped:
        found.append(
            f"Not looked into: {listed(report.untapped)}. Its layers are called in a loop or a "
            "branch, so the second table has no rows for what they return."
        )
    scale = report.recommended_scale
    if scale is None or report.verdict is Verdict.NOT_NEEDED:
        return found
    lowest, highest = report.suitable_scales
    found.append(
        f"Train with a dynamic scale, or with a fixed one: FixedScale({power_of_two(scale)}). "
        f"Any power of two from {power_of_two(lowest)} to {power_of_two(highest)} serves."
    )
    if scale < 1:
        found.append(
            "A dynamic scale must be let go so low: DynamicScale(initial_scale="
            f"{power_of_two(scale)}, min_scale={power_of_two(scale / 2**10)})."
        )
    return found


def columns(report: GradientReport) -> tuple[str, ...]:
    """Returns the headings of `cells`."""
    scale = report.recommended_scale
    at_scale = () if scale in (None, 1.0) else (f"lost at {power_of_two(scale)}",)
    verdict = "prediction" if report.measured_variables else "verdict"
    return ("gradient of", "elements", "largest", "lost unscaled", *at_scale, verdict)


def cells(report: GradientReport, tensor: JudgedTensor) -> tuple[str, ...]:
    """Returns the row of a table: what is to be known about one gradient, as texts."""
    histogram, scale = tensor.histogram, report.recommended_scale
    at_scale: tuple[str, ...] = ()
    if scale is not None and scale != 1.0:
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
    notes = []
    measured = report.measured_variables
    if measured:
        notes.append(
            "Lost in the first table is the share of the sum of |x| where the gradient that was "
            "computed in float16 is 0; the error is ||h - g|| / ||g|| for it and the reference g."
        )
    if any(not variable.has_say for variable in measured):
        notes.append(
            "(**) zero, negligible beside its layer's others, or float16's rounding at any scale."
        )
    notes.append(
        f"Lost{' in the second' if measured else ''} is the share of the sum of |x| that rounding "
        f"to {report.format} turns into zero. Elements are those of one batch."
    )
    shown = [report.cells(tensor)[-1] for tensor in report.tensors]
    if any(cell.endswith("(*)") for cell in shown):
        notes.append("(*) inside the model, where it counts as a recommendation at most.")
    if "negligible" in shown:
        notes.append(
            "Negligible: so small beside the gradients of the same layer that it may be made "
            "of rounding errors, as that of a bias in front of a normalization is."
        )
    notes += _how(report)
    if report.format == "float8_e4m3fn":
        notes.append(
            "float8_e4m3fn has no infinity, and often overflow is cut off at its largest "
            "number. A dynamic scale that waits for infinities then grows without end."
        )
    return notes


def _how(report: GradientReport) -> Iterator[str]:
    fidelity = report.fidelity
    how = (
        f"Measured in {report.measured_in} on {_counted(report.batches, 'batch', 'batches')} "
        f"({_counted(report.samples, 'sample', 'samples')}), with {report.framework}."
    )
    if report.policy != report.measured_in:
        how += (
            f" The model's dtype policy is {report.policy}, in which a gradient without scaling "
            "cannot show what it lost."
        )
    yield how
    if fidelity is None or fidelity.missing:
        return
    what = f"float16: gradients were computed {fidelity.runs} times in all"
    if fidelity.setting:
        what += f", {fidelity.setting}"
    elif "float16" not in report.policy.replace("bfloat16", ""):
        what += ", with each layer under mixed_float16"
    yield f"{what}."
    if fidelity.reference_scale != 1:
        yield (
            "A layer computes in 16 bits whatever it is told to. So the reference was taken at a "
            f"loss scale of {power_of_two(fidelity.reference_scale)}, where it loses nothing."
        )


def listed(names: Sequence[str]) -> str:
    """Returns the first few names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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

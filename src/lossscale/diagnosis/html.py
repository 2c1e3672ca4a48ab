"""A report as one page that opens offline: the verdict, the picture, the numbers."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lossscale.diagnosis.measurement import MARGIN, NEAR, NOISE, Gradient, Measurement
from lossscale.diagnosis.verdict import Verdict

if TYPE_CHECKING:
    from lossscale.diagnosis.report import Report

_ROWS, _FOLDED, _LINES, _OPERATIONS = 20, 180, 60, 10
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 330, 62, 14, 12, 46
_LOWEST, _HIGHEST = 1e-5, 3.0
"""The relative errors between which the picture is drawn."""
_RULER = (-24, 16)
_STYLE = """
:root{--ink:#1b1f24;--dim:#5d6673;--paper:#fff;--line:#d5dae1;--good:#1a7f37;--bad:#b3261e;
--good-area:#1a7f3722;--bad-area:#b3261e22}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebef;--dim:#a2abb8;--paper:#14171b;--line:#39414b;
--good:#5fd07c;--bad:#ff8a80;--good-area:#5fd07c26;--bad-area:#ff8a8026}}
*{box-sizing:border-box}body{margin:0 auto;padding:20px 16px 60px;max-width:820px;color:var(--ink);
background:var(--paper);font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;line-height:1.25}
h2{font-size:1.1rem;margin:2em 0 .4em}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;
font-size:.9rem}.copy{display:flex;gap:12px;align-items:center;border:1px solid var(--line);
border-radius:6px;padding:10px 12px;justify-content:space-between}button{font:inherit;color:inherit;
background:none;border:1px solid var(--line);border-radius:6px;padding:3px 12px;cursor:pointer}
svg{width:100%;min-width:540px;height:auto;display:block}svg text{fill:var(--ink);font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}th,td{
text-align:right;padding:3px 8px;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;
min-width:10em}th{color:var(--dim);font-weight:600}.dim,figcaption{color:var(--dim);font-size:.88rem}
summary{cursor:pointer;padding:6px 0}figure{margin:0}
"""
_COPY = (
    "for(const b of document.querySelectorAll('button'))b.onclick=()=>{"
    "navigator.clipboard.writeText(b.previousElementSibling.textContent);b.textContent='Copied'}"
)


def page(report: Report) -> str:
    """Returns a report as a page of HTML, below 60 kB and with nothing to load.

    Args:
        report: The report. Of more than 200 gradients the rest are counted.
    """
    several = len(report.measurements) > 1
    share = max(len(report.measurements), 1)
    parts = [
        _loss(report, name, verdict, report.measurements[name], several, share)
        for name, verdict in report.verdicts.items()
    ]
    kept = {
        name: dataclasses.replace(
            found,
            gradients=tuple(_worst_first(found.gradients)[: 20 // share]),
            operations=tuple(_nearest(found)),
        )
        for name, found in report.measurements.items()
    }
    short = dataclasses.replace(report, measurements=kept)
    described = json.dumps(_rounded(json.loads(short.to_json())), separators=(",", ":"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(report.model)}: loss scaling</title><style>{_STYLE}</style></head><body>"
        f"{''.join(parts)}<h2>How it was measured</h2><pre>{_text(str(report))}</pre>"
        f'<p class="dim">{_text(_limits(report))}</p>'
        # What ends a script in a text must not end this one.
        f'<script type="application/json">{described.replace("<", chr(92) + "u003c")}</script>'
        f"<script>{_COPY}</script></body></html>"
    )


def _loss(
    report: Report, name: str, verdict: Verdict, found: Measurement, several: bool, share: int
) -> str:
    from lossscale.diagnosis.report import headline, line_to_copy

    title = f"{report.model}, {name}" if several else report.model
    said = headline(dataclasses.replace(verdict, rule=None)) if verdict.rule else headline(verdict)
    lines = [f"<h1>{_text(title)}: {_text(said)}</h1>"]
    if verdict.rule is not None:
        lines.append(
            f'<div class="copy"><pre>rule = {_text(line_to_copy(verdict.rule))}</pre>'
            "<button>Copy</button></div>"
        )
    if verdict.advice:
        lines.append(f"<p>What to do: {_text(verdict.advice)}.</p>")
    if any(each.errors for each in found.gradients):
        lines.append(
            '<h2>What float16 makes of each gradient</h2><figure><div class="wide">'
            f"{_picture(found, verdict)}</div>"
            "<figcaption>A line is the gradient of one variable: how far it is from that of "
            "float32, at the loss scales that were tried. Green: every gradient is right. Red: one "
            "overflows.</figcaption></figure>"
        )
    lines += ["<h2>Where the numbers are in float16</h2>", _bars(found, verdict)]
    lines += [_gradients(found, verdict, share), _operations(found)]
    return "".join(lines)


def _picture(found: Measurement, verdict: Verdict) -> str:
    drawn = [each for each in found.gradients if each.errors and not each.is_noise]
    drawn = _worst_first(drawn)[:_LINES] or list(found.gradients)[:_LINES]
    tried = sorted({exponent for each in drawn for exponent in each.errors})
    low, high = min(tried[0], 0) - 1, max(tried[-1], found.top + 2, 4)

    def x(exponent: float) -> float:
        return _LEFT + (exponent - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(error: float) -> float:
        part = math.log10(min(max(error, _LOWEST), _HIGHEST) / _LOWEST)
        whole = math.log10(_HIGHEST / _LOWEST)
        return _HEIGHT - _BOTTOM - part / whole * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    parts = []
    if found.wrong <= found.tolerance or found.bottom > 0:
        start = max(found.bottom, low) if found.bottom > 0 else low
        if found.top > start:
            parts.append(_area(x(start), x(min(found.top, high)), "good"))
    if found.top < high and not found.top_is_bound:
        parts.append(_area(x(found.top), x(high), "bad"))
    for error in (1.0, 0.1, 0.01, 0.001, 0.0001):
        parts.append(_rule(_LEFT, y(error), _WIDTH - _RIGHT, y(error), "var(--line)"))
        parts.append(_label(_LEFT - 6, y(error) + 4, f"{100 * error:g} %", "end"))
    every = next(step for step in (1, 2, 4, 8, 16, 32) if (high - low) / step <= 10)
    for exponent in range(math.ceil(low / every) * every, high + 1, every):
        parts.append(_label(x(exponent), bottom + 18, f"2^{exponent}" if exponent else "1"))
    parts.append(_label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "loss scale"))
    dashed = 'stroke-dasharray="5 4"'
    limit = y(found.tolerance)
    parts.append(_rule(_LEFT, limit, _WIDTH - _RIGHT, limit, "var(--ink)", dashed))
    for number, each in enumerate(reversed(drawn)):
        worst = (
            number == len(drawn) - 1 and each.wrong_at(0) > found.tolerance
            if 0 in each.errors
            else False
        )
        points = [(x(e), y(error)) for e, error in each.errors.items() if error < math.inf]
        color, width = ("var(--bad)", 3) if worst else ("var(--dim)", 1)
        joined = " ".join(f"{a:.0f},{b:.0f}" for a, b in points)
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'opacity="{1 if worst else 0.45}"><title>{_text(_short(each.name))}</title></polyline>'
        )
        if worst:
            parts += [
                f'<circle cx="{a:.0f}" cy="{b:.0f}" r="4" fill="{color}"/>' for a, b in points
            ]
    parts.append(_rule(x(0), _TOP, x(0), bottom, "var(--ink)"))
    parts.append(_label(x(0) + 5, bottom - 6, "no scaling", "start"))
    if verdict.rule is not None:
        for level, (name, scale) in enumerate(
            (("min_scale", verdict.rule.min_scale), ("initial_scale", verdict.rule.initial_scale))
        ):
            power = math.log2(scale)
            if power >= low:
                at = x(power)
                parts.append(_rule(at, _TOP, at, bottom, "var(--good)", 'stroke-width="2"'))
                anchor = "end" if at > _WIDTH * 0.7 else "start"
                side = -5 if anchor == "end" else 5
                parts.append(
                    _label(at + side, _TOP + 14 + 18 * level, f"{name} 2^{power:.0f}", anchor)
                )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _bars(found: Measurement, verdict: Verdict) -> str:
    """Three bars on one ruler: gradients as they are, gradients scaled, outputs."""
    sizes = [
        each.largest
        for each in found.gradients
        if 0 < each.largest < math.inf and not each.is_noise
    ]
    scale = 2.0**found.top if verdict.rule is None else verdict.rule.initial_scale
    outputs = [-each.room + 16 for each in found.operations if abs(each.room) < math.inf]
    exponents = [math.log2(size) for size in sizes]
    rows = [
        ("gradients without scaling", exponents),
        (f"gradients at 2^{math.log2(scale):.0f}", [e + math.log2(scale) for e in exponents]),
        ("forward", outputs),
    ]
    left = 190
    ends = [value for _, values in rows for value in values]
    low, high = min([_RULER[0], *ends]), max([_RULER[1] + 2, *ends])

    def x(exponent: float) -> float:
        return left + (exponent - low) / (high - low) * (_WIDTH - left - _RIGHT)

    parts = [_area(x(low), x(_RULER[0]), "bad", 112), _area(x(_RULER[1]), x(high), "bad", 112)]
    for exponent, name in ((-24, "2^-24"), (-14, "2^-14"), (0, "1"), (16, "2^16")):
        parts.append(_rule(x(exponent), _TOP, x(exponent), 112, "var(--line)"))
        parts.append(_label(x(exponent), 130, name))
    for number, (name, values) in enumerate(rows):
        top = 22 + 30 * number
        parts.append(_label(left - 8, top + 14, name, "end"))
        if values:
            start, end = min(values), max(values)
            width = max(x(end) - x(start), 4)
            parts.append(
                f'<rect x="{x(start):.0f}" y="{top}" width="{width:.0f}" height="20" rx="3" '
                'fill="var(--dim)"/>'
            )
    return (
        f'<figure><div class="wide"><svg viewBox="0 0 {_WIDTH} 138" role="img">{"".join(parts)}'
        "</svg></div><figcaption>"
        "From the smallest to the largest of the largest numbers in each. Below 2^-24 float16 has "
        "only 0, below 2^-14 fewer digits; at 2^16 it ends.</figcaption></figure>"
    )


def _gradients(found: Measurement, verdict: Verdict, share: int) -> str:
    from lossscale.diagnosis.report import percent

    rows = _worst_first(found.gradients)
    if not rows:
        return ""
    scaled = verdict.rule is not None
    start = math.log2(verdict.rule.initial_scale) if verdict.rule is not None else 0.0

    def cells(each: Gradient) -> list[str]:
        size, near = each.largest, min(each.errors, key=lambda e: abs(e - start), default=None)
        bounded = 0 < size < math.inf
        found = [
            _short(each.name),
            f"{each.elements:,}",
            f"{size:.2g}",
            percent(each.errors[0]) if 0 in each.errors else "",
            f"2^{math.floor(math.log2(65504 / size))}" if bounded else "",
        ]
        if scaled:
            found.append("" if near is None else f"{percent(each.errors[near])} at 2^{near}")
        return found

    head = ["gradient of", "elements", "largest", "wrong at 1", "overflows above"]
    head += ["wrong near the start"] if scaled else []
    most = _FOLDED // share
    shown, folded = rows[:_ROWS], rows[_ROWS : _ROWS + most]
    text = f"<h2>Gradients, worst first</h2>{_table(head, map(cells, shown))}"
    if folded:
        text += (
            f"<details><summary>{len(folded)} more</summary>{_table(head, map(cells, folded))}"
            "</details>"
        )
    rest = len(rows) - len(shown) - len(folded)
    return text + (f'<p class="dim">And {rest:,} more.</p>' if rest else "")


def _operations(found: Measurement) -> str:
    nearest = _nearest(found)
    if not nearest:
        return ""

    def bits(value: float) -> str:
        return "" if math.isnan(value) or math.isinf(value) else f"{value:.0f}"

    rows = ([each.name, bits(each.room), bits(each.reach)] for each in nearest)
    head = ("output of", "bits of room", "bits left for a loss of 0")
    return f"<h2>Outputs with the least room</h2>{_table(head, rows)}"


def _limits(report: Report) -> str:
    found = next(iter(report.measurements.values()))
    return (
        f"A gradient is right within {found.tolerance:.0%} of that of float32, beyond what float16 "
        f"makes of it at its best scale; wrong by {NOISE:.0%} at every scale, it is left out. "
        f"Gradients should stay {MARGIN} bits below overflow, outputs {NEAR}."
    )


def _nearest(found: Measurement) -> list[Any]:
    return sorted(found.operations, key=lambda each: each.room)[:_OPERATIONS]


def _worst_first(gradients: Iterable[Gradient]) -> list[Gradient]:
    def wrong(each: Gradient) -> float:
        return each.wrong_at(0) if 0 in each.errors else -1.0

    return sorted(gradients, key=lambda each: (each.is_noise, -wrong(each)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(each)}</th>" for each in head)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _area(start: float, end: float, kind: str, height: float = _HEIGHT - _BOTTOM) -> str:
    width, high = max(end - start, 0), height - _TOP
    return (
        f'<rect x="{start:.0f}" y="{_TOP}" width="{width:.0f}" height="{high:.0f}" '
        f'fill="var(--{kind}-area)"/>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{color}" {more}/>'
    )


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{_text(text)}</text>'


def _text(value: str) -> str:
    # A page is UTF-8, which a lone surrogate is not.
    whole = value.encode("utf-8", "replace").decode("utf-8")
    return html.escape(whole)


def _short(name: str) -> str:
    """A name without its middle: it may be of any length, and its end says most."""
    return name if len(name) <= 60 else f"{name[:16]}…{name[-43:]}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value

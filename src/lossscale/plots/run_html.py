"""A run as one page that opens offline: the scale, skips with their reasons, losses, alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lossscale.monitoring.history import TrainingHistory
from lossscale.monitoring.record import SkipReason, power_of_two
from lossscale.plots.svg import Panel, escape, legend_mark

_LINE_POINTS, _MARKS, _ALARMS = 600, 100, 20
_SKIPS = {
    SkipReason.OVERFLOW: ("x", "#000000", "gradients overflowed"),
    SkipReason.FLOOR: ("v", "#d55e00", "not finite at the lowest scale"),
    SkipReason.LOSS: ("|", "#000000", "loss not finite"),
    SkipReason.UNKNOWN: ("+", "#0072b2", "reason not known: no loss was recorded"),
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Training run</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:1rem auto;padding:0 1rem}}
svg{{max-width:100%}}svg text{{font-size:13px;fill:#444}}.mark{{vertical-align:middle}}
ul.legend{{list-style:none;padding:0;font-size:.9rem}}</style>
<h1>Training run</h1>{body}</html>
"""


def to_html(history: TrainingHistory) -> str:
    """Returns the page of a run, below 60 kB.

    Args:
        history: The run, with a record at least.
    """
    records, found = history.records, history.summary()
    steps = (float(records[0].step), float(records[-1].step))
    words = (
        f"Steps {found['first_step']} to {found['last_step']}, {found['records']} recorded. "
        f"{found['skips']} skipped ({found['skip_rate']:.2%}), at most "
        f"{found['longest_run_of_skips']} in a row. Loss scale now "
        f"{power_of_two(found['last_scale'])}."
    )
    body = [f"<p>{escape(words)}</p>", *_scale(history, steps), *_losses(history, steps)]
    alarms = found["alarms"]
    if alarms:
        said = "".join(
            f"<li>Step {each['step']}, {escape(each['kind'])}: {escape(each['message'][:600])}</li>"
            for each in alarms[:_ALARMS]
        )
        more = f"<p>{len(alarms) - _ALARMS} more</p>" if len(alarms) > _ALARMS else ""
        body.append(f"<h2>Alarms</h2><ul>{said}</ul>{more}")
    return _PAGE.format(body="".join(body))


def _scale(history: TrainingHistory, steps: tuple[float, float]) -> list[str]:
    records = history.records
    points = [(float(r.step), r.scale) for r in records]
    rule: Any = history.header.scale_rule()
    bounds = {
        "lowest scale of the rule": getattr(rule, "min_scale", None),
        "highest scale of the rule": getattr(rule, "max_scale", None),
    }
    low, high = min(s for _, s in points), max(s for _, s in points)
    # A bound far away would flatten the line.
    near = {n: b for n, b in bounds.items() if b is not None and low / 64 <= b <= high * 64}
    panel = Panel(steps, (min([low, *near.values()]), max([high, *near.values()])), 300, log2=True)
    legend = [(legend_mark("-", "#000000"), "loss scale")]
    for name, bound in near.items():
        panel.line([(steps[0], bound), (steps[1], bound)], "#009e73", "4 4")
        legend.append((legend_mark("-", "#009e73"), f"{name}, {power_of_two(bound)}"))
    panel.line(thinned(points), "#000000")
    for reason, (shape, color, words) in _SKIPS.items():
        skipped = [(float(r.step), r.scale) for r in records if r.reason is reason]
        if skipped:
            panel.marks(_some(skipped), shape, color)
            legend.append((legend_mark(shape, color), f"skipped: {words} ({len(skipped)})"))
    alarmed = [(float(r.step), None) for r in records if r.alarms]
    if alarmed:
        panel.marks(_some(alarmed), "o", "#d55e00")
        legend.append((legend_mark("o", "#d55e00"), f"alarm ({len(alarmed)})"))
    return ["<h2>Loss scale</h2>", panel.text(), _legend(legend)]


def _losses(history: TrainingHistory, steps: tuple[float, float]) -> list[str]:
    known = [(r.step, r.loss) for r in history.records if r.loss is not None]
    finite = [(float(step), loss) for step, loss in known if math.isfinite(loss)]
    lost = [(float(step), None) for step, loss in known if not math.isfinite(loss)]
    if not known:
        return ["<p>No loss was recorded.</p>"]
    numbers = [loss for _, loss in finite] or [0.0]
    panel = Panel(steps, (min(numbers), max(numbers)), 220, log2=False)
    is_mean = history.header.has_mean_losses
    legend = []
    if finite:
        panel.line(thinned(finite), "#0072b2", "6 3" if is_mean else "")
        name = "mean of the losses of the epoch so far" if is_mean else "loss of the step"
        legend.append((legend_mark("-", "#0072b2"), name))
    if lost:
        panel.marks(_some(lost), "|", "#000000")
        legend.append((legend_mark("|", "#000000"), f"loss not finite ({len(lost)})"))
    unknown = len(history.records) - len(known)
    words = f"<p>Of {unknown} recorded steps the loss is not known.</p>" if unknown else ""
    return ["<h2>Loss</h2>", panel.text(), _legend(legend), words]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leaves out points of a long line; of each stretch its lowest and its highest stay."""
    size = math.ceil(2 * len(points) / _LINE_POINTS)
    if size <= 2:
        return list(points)
    kept = [points[0]]
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def _some(points: Sequence[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """As many marks as can be told apart, the first and the last among them."""
    if len(points) <= _MARKS:
        return list(points)
    return [points[round(n * (len(points) - 1) / (_MARKS - 1))] for n in range(_MARKS)]


def _legend(rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li>{mark} {escape(words)}</li>" for mark, words in rows)
    return f'<ul class="legend">{items}</ul>'

"""`lossscale plot`: draws the history of a training run."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from lossscale.cli.files import UsageError, check_picture, read_history, usage_errors
from lossscale.errors import visible
from lossscale.monitoring.record import power_of_two
from lossscale.packages import require

_LARGEST = 1e300


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "plot",
        help="draw the loss scale, the skipped steps and the loss of a training run",
        description="Draws the history that a training run has written: the loss scale by step, "
        "the skipped steps by reason, and the loss. Prints a summary.",
    )
    parser.add_argument(
        "history",
        metavar="HISTORY",
        type=Path,
        help="the history of a run, a file of JSON lines",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the picture to write: .png, .pdf or .svg",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="the page to write: one file that opens offline",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draws a history.

    Args:
        arguments: `history`, `output`, `html` and `json`, as parsed.

    Returns:
        The exit status, 0.

    Raises:
        CommandError: If a file cannot be read or written.
        MissingPackageError: If a package is missing.
    """
    output, page = arguments.output, arguments.html
    if output is None and page is None:
        raise UsageError("the following arguments are required: -o/--output or --html")
    if output is not None:
        check_picture("--output", output)
        require("numpy", "matplotlib")
    if page is not None:
        check_picture("--html", page, (".html",))
    history = read_history(arguments.history)
    if any(abs(loss) > _LARGEST for loss in history.losses if loss and math.isfinite(loss)):
        raise UsageError(f"{arguments.history}: a loss beyond {_LARGEST:g} cannot be drawn")
    summary = history.summary()
    if output is not None:
        draw(history, output)
        summary["picture"] = str(output)
    if page is not None:
        from lossscale.plots.run_html import to_html

        with usage_errors():
            page.write_text(to_html(history), encoding="utf-8")
        summary["page"] = str(page)
    if arguments.json:
        print(json.dumps(summary, allow_nan=False, indent=2))
    else:
        print("\n".join(map(visible, _lines(summary))))
    return 0


def draw(history: Any, path: Path) -> None:
    """Draws a history into a file.

    Args:
        history: A `TrainingHistory`.
        path: The file to write; its suffix says in which format.
    """
    from matplotlib.figure import Figure

    from lossscale.plots import plot_history

    # Not pyplot: a Figure of its own needs no window.
    with_loss = any(loss is not None for loss in history.losses)
    figure = Figure(figsize=(8, 6 if with_loss else 4), layout="constrained")
    if with_loss:
        panels = figure.subplots(2, sharex=True, height_ratios=[3, 2])
        plot_history(history, *panels)
    else:
        plot_history(history, figure.subplots())
    with usage_errors():
        figure.savefig(path, dpi=150)


def _lines(summary: dict[str, Any]) -> list[str]:
    first, last = summary["first_step"], summary["last_step"]
    lines = [
        f"Steps:      {first} to {last}, {summary['records']} of them recorded",
        f"Skipped:    {summary['skips']} ({summary['skip_rate']:.2%}), "
        f"at most {summary['longest_run_of_skips']} in a row",
        f"Loss scale: {power_of_two(summary['first_scale'])} at first, "
        f"{power_of_two(summary['last_scale'])} at last, between "
        f"{power_of_two(summary['lowest_scale'])} and {power_of_two(summary['highest_scale'])}",
    ]
    for name, count in list(summary["overflow_counts"].items())[:5]:
        lines.append(f"Not finite: {name} in {count} recorded step{'s' * (count > 1)}")
    more = len(summary["overflow_counts"]) - 5
    if more > 0:
        lines.append(f"Not finite: {more} more variables; --json names them")
    if summary["truncated"]:
        lines.append("The file ends within a line, which is left out: the run was killed.")
    for name in ("picture", "page"):
        if name in summary:
            lines.append(f"{name.title() + ':':12}{summary[name]}")
    return lines

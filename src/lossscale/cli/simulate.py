"""`lossscale simulate`: what a rule does with overflows, without training anything."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lossscale.cli.arguments import integer, probability, rule_from_words, seed
from lossscale.cli.console import new_console, progress
from lossscale.cli.files import UsageError, check_picture, read_history, usage_errors
from lossscale.errors import visible
from lossscale.monitoring.record import power_of_two
from lossscale.monitoring.simulation import (
    LARGEST_SIMULATION,
    simulate,
    simulate_gradients,
    simulate_random,
)
from lossscale.packages import require

_STEPS, _RUNS, _SEED = 100_000, 16, 0
_DRAWN_RUNS = 3


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "simulate",
        help="run a scaling rule over overflows, without training anything",
        description="Runs a scaling rule over overflows that come at random, or over those of a "
        "training run, and prints what becomes of the loss scale.",
    )
    parser.add_argument(
        "--rule",
        nargs="+",
        default=["DynamicScale"],
        metavar=("RULE", "NAME=VALUE"),
        help="DynamicScale or FixedScale, and then its configuration, such as DynamicScale "
        "growth_interval=500 initial_scale=2**16 (default: DynamicScale)",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--overflow-probability",
        type=probability,
        metavar="P",
        help="each step overflows with this probability, whatever the scale, as bad batches do",
    )
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a text with one number on each line, the largest |gradient| of a step, not scaled "
        "(inf and nan are allowed, # starts a comment); or the history of a run, whose skips are "
        "replayed whatever the scale",
    )
    parser.add_argument(
        "--steps",
        type=lambda text: integer(text, 1, LARGEST_SIMULATION),
        help=f"random overflows: steps of each run (default: {_STEPS})",
    )
    parser.add_argument(
        "--runs",
        type=lambda text: integer(text, 1, LARGEST_SIMULATION),
        help=f"random overflows: how many runs (default: {_RUNS})",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        help=f"random overflows: seed of the random numbers (default: {_SEED})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw the scale, of {_DRAWN_RUNS} runs at most: .png, .pdf or .svg",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the simulation.

    Args:
        arguments: As parsed.

    Returns:
        The exit status, 0.

    Raises:
        CommandError: If an argument or a file cannot be used.
        MissingPackageError: If a package is missing.
    """
    rule = rule_from_words(arguments.rule)
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
    _check_belongs(arguments)
    drawing = () if arguments.plot is None else ("matplotlib",)
    printing = () if arguments.json else ("rich",)
    require("numpy", *drawing, *printing)
    random = arguments.trace is None
    simulation, source = (_at_random if random else _from_trace)(rule, arguments)
    summary = {**simulation.summary(), "picture": None}
    if arguments.plot is not None:
        _draw(simulation, arguments.plot)
        summary["picture"] = str(arguments.plot)
    if arguments.json:
        print(json.dumps(summary, allow_nan=False, indent=2))
    else:
        _print(simulation, summary, source)
    return 0


def _check_belongs(arguments: argparse.Namespace) -> None:
    for name in ("steps", "runs", "seed") if arguments.trace is not None else ():
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} has a meaning only with --overflow-probability")


def _at_random(rule: Any, arguments: argparse.Namespace) -> tuple[Any, str]:
    steps = arguments.steps or _STEPS
    runs = arguments.runs or _RUNS
    chosen = _SEED if arguments.seed is None else arguments.seed
    chance = arguments.overflow_probability
    with usage_errors(), progress("Simulating", steps) as show:
        simulation = simulate_random(
            rule, chance, steps=steps, runs=runs, seed=chosen, after_steps=show
        )
    of = f"{runs} runs of {steps} steps" if runs > 1 else f"one run of {steps} steps"
    return simulation, (
        f"Each step overflows with probability {chance:g}, whatever the scale; {of}, seed {chosen}"
    )


def _from_trace(rule: Any, arguments: argparse.Namespace) -> tuple[Any, str]:
    path = arguments.trace
    with usage_errors(), path.open("rb") as file:
        is_history = file.read(1) == b"{"
    if is_history:
        skips = _skips(path)
        with progress("Simulating", len(skips)) as show:
            simulation = simulate(rule, skips, after_steps=show)
        return simulation, f"The skips of {path}, {len(skips)} steps, whatever the scale"
    magnitudes = _magnitudes(path)
    with usage_errors(), progress("Simulating", len(magnitudes)) as show:
        simulation = simulate_gradients(rule, magnitudes, after_steps=show)
    return simulation, f"The gradients of {path}, {len(magnitudes)} steps, in float16"


def _skips(path: Path) -> list[bool]:
    history = read_history(path)
    steps = history.steps
    if steps[-1] - steps[0] + 1 != len(steps):
        raise UsageError(
            f"{path}: only {len(steps)} of the steps {steps[0]} to {steps[-1]} are recorded, so "
            "they cannot be replayed"
        )
    return [record.skipped for record in history.records]


def _magnitudes(path: Path) -> list[float]:
    with usage_errors():
        content = path.read_bytes()
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: this is no text with one number on each line") from None
    numbers = []
    for number, line in enumerate(lines, start=1):
        shown = line.partition("#")[0].strip()
        if not shown:
            continue
        try:
            magnitude = float(shown)
        except ValueError:
            magnitude = -1.0
        if magnitude < 0:
            raise UsageError(
                f"{path}, line {number}: must be the largest |gradient| of a step, a number from "
                f"0 up, not {shown[:40]!r}"
            )
        numbers.append(magnitude)
    if not numbers:
        raise UsageError(f"{path}: there is no number in this file")
    return numbers


def _draw(simulation: Any, path: Path) -> None:
    from matplotlib.figure import Figure

    from lossscale.plots import plot_scales

    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
    runs = min(len(simulation.scales), _DRAWN_RUNS)
    for index in range(runs):
        # The skips of several runs would hide the lines.
        skipped = simulation.skipped[index].tolist() if runs == 1 else None
        label = f"run {index + 1}" if runs > 1 else "loss scale"
        plot_scales(simulation.scales[index].tolist(), skipped, ax, label=label, style=index)
    with usage_errors():
        figure.savefig(path, dpi=150)


def _print(simulation: Any, summary: dict[str, Any], source: str) -> None:
    from rich.table import Table

    console = new_console()
    for line in (_shown(simulation.rule), source):
        console.print(visible(line), markup=False, soft_wrap=True)
    law = summary["expected_drift"] is not None
    table = Table()
    # All columns may be folded: what is narrow must not lose its numbers.
    table.add_column("", overflow="fold")
    table.add_column("simulated", justify="right")
    if law:
        table.add_column("law *", justify="right")
    for name, found, expected in _rows(simulation, summary):
        table.add_row(name, found, *([expected] if law else []))
    console.print(table)
    if law:
        console.print(_explanation(simulation), markup=False)
    if summary["picture"] is not None:
        console.print(f"Picture: {summary['picture']}", markup=False, soft_wrap=True)


def _shown(rule: Any) -> str:
    settings = (f"{name}={_setting(value)}" for name, value in rule.get_config().items())
    return f"{type(rule).__name__}({', '.join(settings)})"


def _setting(value: Any) -> str:
    return power_of_two(value) if isinstance(value, float) else str(value)


def _rows(simulation: Any, summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    expected, floor = summary["expected_drift"], summary["share_at_floor"]
    final = summary["final_scale"]
    what = "skipped" if simulation.rule.checks_gradients else "applied with an overflow"
    chance = "" if expected is None else f"{summary['probability']:.3%}"
    rows = [(f"steps {what}", f"{summary['overflow_rate']:.3%}", chance)]
    if expected is not None:
        drift = "-" if summary["drift"] is None else f"{1000 * summary['drift']:+.3f}"
        if summary["drift_error"] is not None:
            drift += f" ± {1000 * summary['drift_error']:.3f}"
        rows.append(("drift of log2(scale) in 1000 steps", drift, f"{1000 * expected:+.3f}"))
    if floor is not None and simulation.rule.moves:
        rows.append(("steps at the lowest scale", f"{floor:.1%}", ""))
    middle, low, high = (power_of_two(final[k]) for k in ("median", "lowest", "highest"))
    between = f" ({low} to {high})" if low != high else ""
    rows.append((f"final scale{', median' if between else ''}", middle + between, ""))
    return rows


def _explanation(simulation: Any) -> str:
    rule, chance = simulation.rule, simulation.probability
    critical = simulation.critical_probability
    waiting = rule.overflows_before_backoff
    waits = f" and overflows_before_backoff={waiting}" if waiting > 1 else ""
    falls = "falls to its lowest value" if chance > critical else "stays up"
    return (
        f"* Away from the lowest and the highest scale. With growth_interval="
        f"{rule.growth_interval}{waits} the scale falls if more than {critical:.3g} of the steps "
        f"overflow whatever the scale. At {chance:g} it {falls}."
    )

"""What the demo says: its introduction, its table and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossscale import DynamicScale, FixedScale
from lossscale.cli import digits
from lossscale.diagnostics import GradientHistogram
from lossscale.diagnostics.powers import power_of_two
from lossscale.plots import plot_accuracy, plot_gradient_range, plot_scales


def introduce(console: Any, backend: str, epochs: int, seed: int) -> None:
    """Says what is going to be trained, and how.

    Args:
        console: The rich Console to print on.
        backend: What Keras computes with.
        epochs: Epochs of each run.
        seed: The seed of all runs.
    """
    fixed, dynamic = _rules()
    console.print(
        f"[bold]Handwritten digits, learned four ways[/bold] "
        f"(Keras on {backend}, {epochs} epochs, seed {seed})\n"
    )
    console.print(
        f"The loss is averaged over {power_of_two(digits.OUTPUTS)} outputs, as many as an image of "
        "1024 x 1024 pixels has. This is done on purpose: digits alone do not need it. A network "
        "that predicts a label for every pixel does just this. The learning rate is raised by the "
        "same factor, so in float32 nothing changes. But the gradients are now so small that "
        "float16 has no number for them, and they become zero.\n"
    )
    console.print(
        f"Fixed scale: {power_of_two(fixed.scale)}, which undoes the averaging.\n"
        f"Dynamic scale: starts at {power_of_two(dynamic.initial_scale)}, too high on purpose. It "
        f"is halved and the step skipped when a gradient overflows, and doubled after "
        f"{dynamic.growth_interval} finite steps in a row (the library's default is "
        f"{DynamicScale().growth_interval}, too long to see anything here).\n"
    )


def _rules() -> tuple[FixedScale, DynamicScale]:
    rules = [recipe.rule for recipe in digits.RECIPES]
    fixed = next(rule for rule in rules if isinstance(rule, FixedScale))
    dynamic = next(rule for rule in rules if isinstance(rule, DynamicScale))
    return fixed, dynamic


def print_table(console: Any, runs: Sequence[digits.Run]) -> None:
    """Prints what came out, one row per run.

    Args:
        console: The rich Console to print on.
        runs: The runs, each of at least one epoch.
    """
    from rich.table import Table

    table = Table()
    table.add_column("", no_wrap=True, vertical="middle")
    for heading in (
        "test\naccuracy",
        "flushed\nto zero *",
        "steps\nskipped",
        "final\nscale",
        "seconds",
    ):
        table.add_column(heading, justify="right", vertical="bottom")
    for run in runs:
        scaled = run.final_scale is not None
        table.add_row(
            run.recipe.name,
            f"{run.accuracy[-1]:.1%}",
            f"{sum(run.flushed) / len(run.flushed):.2%}",
            f"{sum(run.skipped)} of {len(run.skipped)}" if scaled else "-",
            power_of_two(run.final_scale) if run.final_scale is not None else "-",
            f"{run.seconds:.1f}",
        )
    console.print(table)
    console.print(
        "* Gradients of the weights that are not zero in float32, but zero when computed in the "
        "run's own precision and with its scale, from the same weights and images. Mean of "
        "one measurement after each epoch. Gradients shrink as the network learns; a fixed scale "
        "does not follow them.\n"
    )


def draw(runs: Sequence[digits.Run], gradients: Any, path: Path) -> None:
    """Draws the picture of the demo.

    Args:
        runs: The runs.
        gradients: float32 array of gradients at the first weights, not scaled.
        path: The file to write; its suffix says in which format.
    """
    from matplotlib.figure import Figure

    # Not pyplot: a Figure of its own needs no window and leaves the caller's figures alone.
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["accuracy", "scales"], ["exponents", "exponents"]]
    )

    plot_accuracy({run.recipe.name: run.accuracy for run in runs}, axes["accuracy"])
    axes["accuracy"].set_title("Accuracy after each epoch")

    for index, run in enumerate(runs):
        if run.scales:
            plot_scales(run.scales, run.skipped, axes["scales"], label=run.recipe.name, style=index)
    axes["scales"].set_title("Loss scale over the steps")

    histogram = GradientHistogram.from_array(gradients)
    histograms = {"unscaled (float16, no scaling)": histogram}
    for run in runs:
        if run.recipe.rule is not None:
            scale = _first_applied(run)
            exponent = round(math.log2(scale))
            name = f"times $2^{{{exponent}}}$ ({run.recipe.name})"
            histograms[name] = histogram.scaled(exponent)
    plot_gradient_range(histograms, axes["exponents"])
    axes["exponents"].set_title("Gradients before the first step against float16's range", pad=24)
    figure.suptitle(
        f"Handwritten digits. The loss is averaged over $2^{{{round(math.log2(digits.OUTPUTS))}}}$ "
        "outputs on purpose, as over the pixels of a 1024 x 1024 image:\n"
        "without scaling, float16 gradients become zero.",
        fontsize="large",
    )
    figure.savefig(path, dpi=120)


def _first_applied(run: digits.Run) -> float:
    applied = (scale for scale, skip in zip(run.scales, run.skipped, strict=True) if not skip)
    return next(applied, run.scales[0])

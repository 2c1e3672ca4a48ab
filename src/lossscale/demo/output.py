"""What the demo says and draws: its introduction, table and picture. Needs no framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossscale.demo.experiment import DYNAMIC, FIXED, OUTPUTS, Run
from lossscale.diagnosis.report import Report
from lossscale.monitoring.record import power_of_two
from lossscale.plots import plot_accuracy, plot_diagnosis, plot_scales
from lossscale.rules import DynamicScale


def introduce(console: Any, framework: str, epochs: int, seed: int) -> None:
    """Says what is going to be trained, and how.

    Args:
        console: The rich Console to print on.
        framework: What trains, such as "Keras on jax".
        epochs: Epochs of each run.
        seed: The seed of all runs.
    """
    console.print(
        f"[bold]Handwritten digits, learned four ways[/bold] "
        f"({framework}, {epochs} epochs, seed {seed})\n"
    )
    console.print(
        f"The loss is averaged over {power_of_two(OUTPUTS)} outputs, as many as an image of "
        "1024 x 1024 pixels has. This is done on purpose: digits alone do not need it. A network "
        "that predicts a label for every pixel does just this. The learning rate is raised by the "
        "same factor, so in float32 nothing changes. But the gradients are now so small that "
        "float16 has no number for them, and they become zero.\n"
    )
    console.print(
        f"Fixed scale: {power_of_two(FIXED.scale)}, which undoes the averaging.\n"
        f"Dynamic scale: starts at {power_of_two(DYNAMIC.initial_scale)}, too high on purpose. It "
        f"is halved and the step skipped when a gradient overflows, and doubled after "
        f"{DYNAMIC.growth_interval} finite steps in a row (the library's default is "
        f"{DynamicScale().growth_interval}, too long to see anything here).\n"
    )


def print_table(console: Any, runs: Sequence[Run]) -> None:
    """Prints what came out, one row per run.

    Args:
        console: The rich Console to print on.
        runs: The runs, each of at least one epoch.
    """
    from rich.table import Table

    table = Table()
    table.add_column("", overflow="fold", vertical="middle")
    for heading in (
        "test\naccuracy",
        "flushed\nto zero *",
        "steps\nskipped",
        "final\nscale",
        "seconds\n**",
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
        "** Times vary from machine to machine. Few processors compute in float16 as fast as in "
        "float32; on the others float16 only takes longer.\n"
    )


def draw(runs: Sequence[Run], report: Report, path: Path) -> None:
    """Draws accuracy by epoch, loss scale by step, and what float16 does to gradients.

    Args:
        runs: The runs, each of at least one epoch.
        report: The diagnosis at the first weights.
        path: The file to write; its suffix says in which format.
    """
    from matplotlib.figure import Figure

    # Not pyplot: a Figure of its own needs no window and leaves the caller's figures alone.
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["accuracy", "scales"], ["gradients", "gradients"]]
    )

    plot_accuracy({run.recipe.name: run.accuracy for run in runs}, axes["accuracy"])
    axes["accuracy"].set_title("Accuracy after each epoch")

    for index, run in enumerate(runs):
        if run.scales:
            plot_scales(run.scales, run.skipped, axes["scales"], label=run.recipe.name, style=index)
    axes["scales"].set_title("Loss scale over the steps")

    plot_diagnosis(report, axes["gradients"])
    figure.suptitle(
        f"Handwritten digits. The loss is averaged over $2^{{{round(math.log2(OUTPUTS))}}}$ "
        "outputs on purpose, as over the pixels of a 1024 x 1024 image:\n"
        "without scaling, float16 gradients become zero.",
        fontsize="large",
    )
    figure.savefig(path, dpi=120)

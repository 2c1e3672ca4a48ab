"""The picture of the demo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossscale.demo.experiment import OUTPUTS, Run
from lossscale.diagnosis.report import Report
from lossscale.plots import plot_accuracy, plot_diagnosis, plot_scales


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

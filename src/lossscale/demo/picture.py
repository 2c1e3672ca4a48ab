"""The picture of the demo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossscale.demo.experiment import OUTPUTS, Run
from lossscale.diagnostics import GradientHistogram
from lossscale.plots import plot_accuracy, plot_gradient_range, plot_scales


def draw(runs: Sequence[Run], gradients: Any, path: Path) -> None:
    """Draws accuracy by epoch, loss scale by step, and gradients over the range of float16.

    Args:
        runs: The runs, each of at least one epoch.
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
            exponent = round(math.log2(run.first_applied_scale))
            name = f"times $2^{{{exponent}}}$ ({run.recipe.name})"
            histograms[name] = histogram.scaled(exponent)
    plot_gradient_range(histograms, axes["exponents"])
    axes["exponents"].set_title(
        "Gradients of the weights before the first step, computed in float32, over float16's range",
        pad=24,
    )
    figure.suptitle(
        f"Handwritten digits. The loss is averaged over $2^{{{round(math.log2(OUTPUTS))}}}$ "
        "outputs on purpose, as over the pixels of a 1024 x 1024 image:\n"
        "without scaling, float16 gradients become zero.",
        fontsize="large",
    )
    figure.savefig(path, dpi=120)

"""Drawings with matplotlib: each function takes data and an Axes, and returns the Axes."""

from lossscale.plots.curves import plot_scales
from lossscale.plots.history import plot_history

__all__ = ["plot_history", "plot_scales"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)

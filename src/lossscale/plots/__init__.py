"""Plots with matplotlib: each function takes data and an Axes, and returns the Axes."""

from lossscale.plots.curves import plot_records

__all__ = ["plot_records"]

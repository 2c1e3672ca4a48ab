"""Drawings with matplotlib: each function takes data and an Axes, and returns the Axes."""

from lossscale.plots.accuracy import plot_accuracy as plot_accuracy
from lossscale.plots.exponents import plot_exponents as plot_exponents
from lossscale.plots.scales import plot_scales as plot_scales

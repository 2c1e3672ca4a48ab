"""Drawings with matplotlib: each function takes data and an Axes, and returns the Axes."""

from lossscale.plots.curves import plot_accuracy as plot_accuracy
from lossscale.plots.curves import plot_scales as plot_scales
from lossscale.plots.diagnosis import plot_diagnosis as plot_diagnosis
from lossscale.plots.history import plot_history as plot_history

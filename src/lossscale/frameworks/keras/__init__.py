"""Keras 3, on each of its backends."""

from lossscale.frameworks.keras.shell import KerasLossScaleOptimizer

__all__ = ["KerasLossScaleOptimizer"]

"""Keras 3, on each of its backends."""

from lossscale.keras.shell import KerasLossScaleOptimizer

__all__ = ["KerasLossScaleOptimizer"]

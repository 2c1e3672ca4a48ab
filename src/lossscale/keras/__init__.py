"""Keras 3, on each of its backends."""

from lossscale.keras.arguments import hard_sigmoid as hard_sigmoid
from lossscale.keras.optimizer import KerasLossScaleOptimizer

__all__ = ["KerasLossScaleOptimizer"]

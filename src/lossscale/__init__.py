"""Loss scaling for float16 training."""

from lossscale.errors import LossScaleError, LossScaleWarning
from lossscale.optimizer import LossScaleOptimizer
from lossscale.rules import DynamicScale, FixedScale, ScaleRule, ScaleState

__all__ = [
    "DynamicScale",
    "FixedScale",
    "LossScaleError",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "ScaleRule",
    "ScaleState",
]

"""Loss scaling for float16 training."""

from lossscale.errors import LossScaleError, LossScaleWarning
from lossscale.installation import Installation, install, register, register_later
from lossscale.optimizer import LossScaleOptimizer
from lossscale.rules import DynamicScale, FixedScale, ScaleRule, ScaleState

__all__ = [
    "DynamicScale",
    "FixedScale",
    "Installation",
    "LossScaleError",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "ScaleRule",
    "ScaleState",
    "install",
    "register",
]

register()
register_later()
del register_later

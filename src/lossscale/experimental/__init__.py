"""The names of TensorFlow 2.0 to 2.3, over the same core.

`LossScaleOptimizer(optimizer, loss_scale)` takes a number, `"dynamic"` or a `LossScale`, and its
`loss_scale` is that object: call it for the current value.
"""

from lossscale.experimental.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from lossscale.experimental.optimizer import LossScaleOptimizer

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleOptimizer"]


def __dir__() -> list[str]:
    # What is public, for completion.
    return sorted(__all__)

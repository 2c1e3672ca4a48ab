"""The names of TensorFlow 2.0 to 2.3, with the same core.

`LossScaleOptimizer(optimizer, loss_scale)` takes a number, `"dynamic"` or a `LossScale`, and its
`loss_scale` is that object: call it for the current value.
"""

from typing import TYPE_CHECKING, Any

from lossscale import registry
from lossscale.experimental.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from lossscale.experimental.optimizer import LossScaleOptimizer

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleOptimizer"]

if TYPE_CHECKING:
    from lossscale.experimental import keras as keras
    from lossscale.experimental import tf_keras as tf_keras
else:

    def __getattr__(name: str) -> Any:
        # The base classes for users, in modules that import a Keras.
        if name in [framework.root for framework in registry.KERASES]:
            return registry.submodule("lossscale.experimental", name)
        raise AttributeError(f"module 'lossscale.experimental' has no attribute {name!r}")

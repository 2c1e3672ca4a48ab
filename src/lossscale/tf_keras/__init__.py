"""tf_keras, the Keras of TensorFlow 2: its current optimizers and its legacy ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossscale.tf_keras.current import TFKerasLossScaleOptimizer
from lossscale.tf_keras.legacy import TFKerasLegacyLossScaleOptimizer

if TYPE_CHECKING:
    from lossscale.tf_keras.monitor import LossScaleMonitor as LossScaleMonitor

__all__ = ["LossScaleMonitor", "TFKerasLegacyLossScaleOptimizer", "TFKerasLossScaleOptimizer"]


def __getattr__(name: str) -> Any:
    # Training needs nothing of what a monitor imports.
    if name != "LossScaleMonitor":
        raise AttributeError(f"module 'lossscale.tf_keras' has no attribute {name!r}")
    from lossscale.tf_keras.monitor import LossScaleMonitor

    return LossScaleMonitor

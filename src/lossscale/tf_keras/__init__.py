"""tf_keras, the Keras of TensorFlow 2: its new optimizers and its legacy ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossscale import registry

with registry.naming_missing_packages("tf_keras", "tensorflow"):
    from lossscale.keras_common.guard import guard
    from lossscale.tf_keras.classes import LossScaleOptimizer

__all__ = ["LossScaleMonitor", "LossScaleOptimizer", "guard"]

if TYPE_CHECKING:
    from lossscale.tf_keras.monitor import LossScaleMonitor as LossScaleMonitor
else:

    def __getattr__(name: str) -> Any:
        # Imported late: training does not need what a monitor imports.
        if name != "LossScaleMonitor":
            raise AttributeError(f"module 'lossscale.tf_keras' has no attribute {name!r}")
        from lossscale.tf_keras.monitor import LossScaleMonitor

        return LossScaleMonitor

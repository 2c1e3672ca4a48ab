"""tf_keras, the Keras of TensorFlow 2: its new optimizers and its legacy ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lossscale import registry

with registry.naming_missing_packages("tf_keras", "tensorflow"):
    from lossscale.keras_common.guard import guard
    from lossscale.tf_keras.optimizer import LossScaleOptimizer

__all__ = ["LossScaleMonitor", "LossScaleOptimizer", "guard"]

if TYPE_CHECKING:
    from lossscale.tf_keras.monitor import LossScaleMonitor as LossScaleMonitor
else:
    __getattr__ = registry.imported_late(__name__, LossScaleMonitor=f"{__name__}.monitor")

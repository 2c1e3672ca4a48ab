"""Keras 3, on each of its backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lossscale import registry

with registry.naming_missing_packages("keras"):
    from lossscale.keras.arguments import hard_sigmoid as hard_sigmoid
    from lossscale.keras.optimizer import LossScaleOptimizer
    from lossscale.keras_common.guard import guard

__all__ = ["LossScaleMonitor", "LossScaleOptimizer", "guard"]

if TYPE_CHECKING:
    from lossscale.keras.monitor import LossScaleMonitor as LossScaleMonitor
else:
    __getattr__ = registry.imported_late(__name__, f"{__name__}.monitor", "LossScaleMonitor")

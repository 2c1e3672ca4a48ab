"""Keras 3, on each of its backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossscale import registry

with registry.naming_missing_packages("keras"):
    from lossscale.keras.arguments import hard_sigmoid as hard_sigmoid
    from lossscale.keras.optimizer import LossScaleOptimizer
    from lossscale.keras_common.guard import guard

__all__ = ["LossScaleMonitor", "LossScaleOptimizer", "guard"]

if TYPE_CHECKING:
    from lossscale.keras.monitor import LossScaleMonitor as LossScaleMonitor
else:

    def __getattr__(name: str) -> Any:
        # Imported late: training does not need what a monitor imports.
        if name != "LossScaleMonitor":
            raise AttributeError(f"module 'lossscale.keras' has no attribute {name!r}")
        from lossscale.keras.monitor import LossScaleMonitor

        return LossScaleMonitor

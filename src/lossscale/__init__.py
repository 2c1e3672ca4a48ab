"""Loss scaling for float16 training."""

from typing import TYPE_CHECKING, Any

from lossscale import registry as registry
from lossscale.errors import LossScaleError, LossScaleWarning
from lossscale.installation import Installation, install
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
    "__version__",
    "install",
]

__version__ = "0.2.0"

# Imported on first access, because these import frameworks.
_SUBMODULES = (
    "callbacks",
    "diagnosis",
    "experimental",
    "keras",
    "monitoring",
    "optax",
    "tf_keras",
    "torch",
)

if TYPE_CHECKING:
    from lossscale import callbacks as callbacks
    from lossscale import diagnosis as diagnosis
    from lossscale import experimental as experimental
    from lossscale import keras as keras
    from lossscale import monitoring as monitoring
    from lossscale import optax as optax
    from lossscale import tf_keras as tf_keras
    from lossscale import torch as torch
else:

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return registry.submodule("lossscale", name)
        raise AttributeError(f"module 'lossscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])

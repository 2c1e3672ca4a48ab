"""Loss scaling for float16 training."""

import importlib
from typing import TYPE_CHECKING, Any

from lossscale.errors import LossScaleError, LossScaleWarning
from lossscale.installation import Installation, install, register, register_later
from lossscale.optimizer import LossScaleOptimizer
from lossscale.rules import (
    DynamicScale,
    FixedScale,
    GradientStats,
    ScaleRule,
    ScaleState,
    StatsRequest,
)

__all__ = [
    "DynamicScale",
    "FixedScale",
    "GradientStats",
    "Installation",
    "LossScaleError",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "ScaleRule",
    "ScaleState",
    "StatsRequest",
    "__version__",
    "install",
    "register",
]

__version__ = "0.2.0"

# Imported when they are first asked for, because of what they import.
_SUBMODULES = frozenset(
    (
        "callbacks",
        "cli",
        "diagnosis",
        "monitoring",
        "experimental",
        "migration",
        "optax",
        "plots",
        "torch",
    )
)

if TYPE_CHECKING:
    from lossscale import callbacks as callbacks
    from lossscale import cli as cli
    from lossscale import diagnosis as diagnosis
    from lossscale import experimental as experimental
    from lossscale import migration as migration
    from lossscale import monitoring as monitoring
    from lossscale import optax as optax
    from lossscale import plots as plots
    from lossscale import torch as torch
else:

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"lossscale.{name}")
        raise AttributeError(f"module 'lossscale' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_SUBMODULES})


register()
register_later()
del register_later


def __dir__() -> list[str]:
    # What is public, for completion.
    return sorted({*__all__, *_SUBMODULES})

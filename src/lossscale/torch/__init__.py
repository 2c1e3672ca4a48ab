"""Loss scaling for PyTorch itself, without Keras.

`LossScaleOptimizer` wraps an optimizer of PyTorch, and `MasterWeights`, inside it, one of a float16
model; `guard` lets the buffers of a model and a
learning rate schedule follow the steps that were applied. `float32_state_dict` exports a float16
model with its masters. `GradScaler` is a drop-in for
`torch.amp.GradScaler`, and `install` puts it in the places of that one. `diagnose` says whether a
model needs any of them. `Monitor` records what they do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lossscale.packages import not_installed, shadowed

__all__ = [
    "GradScaler",
    "LossScaleOptimizer",
    "MasterWeights",
    "Monitor",
    "diagnose",
    "explain",
    "float32_state_dict",
    "guard",
    "install",
    "unguard",
]

_WHERE = {
    "GradScaler": "grad_scaler",
    "LossScaleOptimizer": "optimizer",
    "MasterWeights": "master_weights",
    "Monitor": "monitor",
    "diagnose": ".diagnosis.torch",
    "explain": "explaining",
    "float32_state_dict": "averages",
    "guard": "scheduler",
    "install": "installation",
    "unguard": "scheduler",
}
"""The modules of the names."""

if TYPE_CHECKING:
    from lossscale.diagnosis.torch import diagnose as diagnose
    from lossscale.torch.averages import float32_state_dict as float32_state_dict
    from lossscale.torch.explaining import explain as explain
    from lossscale.torch.grad_scaler import GradScaler as GradScaler
    from lossscale.torch.installation import install as install
    from lossscale.torch.master_weights import MasterWeights as MasterWeights
    from lossscale.torch.monitor import Monitor as Monitor
    from lossscale.torch.optimizer import LossScaleOptimizer as LossScaleOptimizer
    from lossscale.torch.scheduler import guard as guard
    from lossscale.torch.scheduler import unguard as unguard
else:
    # To import this module is not to import PyTorch; to take a name out of it is.
    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module 'lossscale.torch' has no attribute {name!r}")
        try:
            module = importlib.import_module(f".{_WHERE[name]}", "lossscale.torch")
        except ImportError as error:
            other = shadowed(error)
            needed = error.name if isinstance(error, ModuleNotFoundError) else None
            if other is None and needed not in ("torch", "numpy"):
                raise
            raise other or not_installed([needed]) from None
        # Also in the place of a module of that name, which importing it has put here.
        globals()[name] = getattr(module, name)
        return globals()[name]

    def __dir__() -> list[str]:
        # What is public, for completion.
        return sorted(__all__)

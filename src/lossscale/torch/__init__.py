"""Loss scaling for PyTorch itself, without Keras.

`LossScaleOptimizer` wraps an optimizer of PyTorch, and `MasterWeights`, inside it, one of a float16
model; `guard` lets the buffers of a model and a learning rate schedule follow the steps that were
applied. `float32_state_dict` exports a float16 model with its masters. `GradScaler` is a drop-in
for `torch.amp.GradScaler`, and `install` puts it in the places of that one. `diagnose` says whether
a model needs any of them. `Monitor` records what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lossscale import registry

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

if TYPE_CHECKING:
    from lossscale.diagnosis.torch import diagnose as diagnose
    from lossscale.explain.torch import explain as explain
    from lossscale.torch.averages import float32_state_dict as float32_state_dict
    from lossscale.torch.grad_scaler import GradScaler as GradScaler
    from lossscale.torch.guarding import guard as guard
    from lossscale.torch.guarding import unguard as unguard
    from lossscale.torch.installation import install as install
    from lossscale.torch.master_weights import MasterWeights as MasterWeights
    from lossscale.torch.monitor import Monitor as Monitor
    from lossscale.torch.optimizer import LossScaleOptimizer as LossScaleOptimizer
else:
    # To import this module is not to import PyTorch; to take a name out of it is.
    __getattr__ = registry.imported_late(
        __name__,
        GradScaler="lossscale.torch.grad_scaler",
        LossScaleOptimizer="lossscale.torch.optimizer",
        MasterWeights="lossscale.torch.master_weights",
        Monitor="lossscale.torch.monitor",
        diagnose="lossscale.diagnosis.torch",
        explain="lossscale.explain.torch",
        float32_state_dict="lossscale.torch.averages",
        guard="lossscale.torch.guarding",
        install="lossscale.torch.installation",
        unguard="lossscale.torch.guarding",
    )


def __dir__() -> list[str]:
    # What is public, for completion.
    return sorted(__all__)

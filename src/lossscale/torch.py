"""Loss scaling for PyTorch itself, without Keras.

`LossScaleOptimizer` wraps an optimizer of PyTorch; `guard` lets a learning rate schedule follow the
steps that were applied. `GradScaler` is a drop-in for `torch.amp.GradScaler`, and `install` puts it
in the places of that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossscale.errors import MissingPackageError

__all__ = ["GradScaler", "LossScaleOptimizer", "Monitor", "diagnose", "guard", "install"]

if TYPE_CHECKING:
    from lossscale.frameworks.torch.names import GradScaler as GradScaler
    from lossscale.frameworks.torch.names import LossScaleOptimizer as LossScaleOptimizer
    from lossscale.frameworks.torch.names import Monitor as Monitor
    from lossscale.frameworks.torch.names import diagnose as diagnose
    from lossscale.frameworks.torch.names import guard as guard
    from lossscale.frameworks.torch.names import install as install
else:
    # To import this module is not to import PyTorch; to take a name out of it is.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'lossscale.torch' has no attribute {name!r}")
        try:
            from lossscale.frameworks.torch import names
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingPackageError(
                "lossscale.torch needs PyTorch, which is not installed. Install it with "
                "pip install torch."
            ) from None
        globals()[name] = getattr(names, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

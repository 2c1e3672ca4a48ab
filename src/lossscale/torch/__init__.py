"""Loss scaling for PyTorch itself, without Keras.

`LossScaleOptimizer` wraps an optimizer of PyTorch; `guard` lets a learning rate schedule follow the
steps that were applied. `GradScaler` is a drop-in for `torch.amp.GradScaler`, and `install` puts it
in the places of that one. `diagnose` says whether a model needs any of them. `Monitor` records what
they do; `LightningMonitor` and `TransformersMonitor` do it in the trainers of these libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossscale.errors import MissingPackageError
from lossscale.packages import not_installed

__all__ = ["GradScaler", "LossScaleOptimizer", "Monitor", "diagnose", "guard", "install"]

_OF_TRAINERS = {"LightningMonitor": "lightning", "TransformersMonitor": "transformers"}
"""Names that need another library, and are taken by `import *` from nobody."""

if TYPE_CHECKING:
    from lossscale.torch.monitors.lightning import LightningMonitor as LightningMonitor
    from lossscale.torch.monitors.transformers import (
        TransformersMonitor as TransformersMonitor,
    )
    from lossscale.torch.names import GradScaler as GradScaler
    from lossscale.torch.names import LossScaleOptimizer as LossScaleOptimizer
    from lossscale.torch.names import Monitor as Monitor
    from lossscale.torch.names import diagnose as diagnose
    from lossscale.torch.names import guard as guard
    from lossscale.torch.names import install as install
else:
    # To import this module is not to import PyTorch; to take a name out of it is.
    def __getattr__(name: str) -> Any:
        if name not in (*__all__, *_OF_TRAINERS):
            raise AttributeError(f"module 'lossscale.torch' has no attribute {name!r}")
        try:
            found = _found(name)
        except ModuleNotFoundError as error:
            missing, purpose = (error.name or "").partition(".")[0], f"lossscale.torch.{name}"
            if missing == "torch":
                raise not_installed([missing], purpose=purpose) from None
            if missing != _OF_TRAINERS.get(name):
                raise
            raise MissingPackageError(
                f"{purpose} needs {missing}, which is not installed: pip install {missing}"
            ) from None
        globals()[name] = found
        return found

    def _found(name: str) -> Any:
        if name == "LightningMonitor":
            from lossscale.torch.monitors import lightning as module
        elif name == "TransformersMonitor":
            from lossscale.torch.monitors import transformers as module
        else:
            from lossscale.torch import names as module
        return getattr(module, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_OF_TRAINERS})

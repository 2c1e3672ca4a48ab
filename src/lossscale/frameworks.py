"""Where pickles of lossscale 0.1.0 look for its classes: in modules that have moved since."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

_NOW = {
    "jax.notes": "jax.notes",
    "jax.optax.noting": "optax.noting",
    "jax.optax.scale_state": "optax.scale_state",
    "keras.shell": "keras",
    "shell.copies": "keras_common",
    "tf_keras.for_current_optimizers": "tf_keras",
    "tf_keras.for_legacy_optimizers": "tf_keras",
    "torch.grad_scaler.scaler": "torch.grad_scaler",
    "torch.optimizer.marks": "frameworks",
    "torch.optimizer.optimizer": "torch.optimizer",
    "torch.optimizer.scales": "frameworks",
}
"""The modules that pickles name, below `lossscale.frameworks`, and where their names are now."""


class Attributes:
    """Stands for a class that is gone; who is unpickled takes over what it holds."""


class Values(tuple[Any, ...]):
    """Stands for a named tuple that is gone."""

    def __new__(cls, *values: Any) -> Values:
        return super().__new__(cls, values)


HostScales = DeviceScales = Marks = Attributes
Factors = Counts = Values


def _found(module: str, name: str) -> Any:
    # Whoever looks through all modules asks for `__file__` and the like, and must import nothing.
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module(f"lossscale.{module}"), name)


for _before, _after in _NOW.items():
    _path = __name__
    for _part in _before.split("."):
        # A folder of that time holds nothing itself.
        _path = f"{_path}.{_part}"
        sys.modules.setdefault(_path, ModuleType(_path))
    vars(sys.modules[_path])["__getattr__"] = functools.partial(_found, _after)

"""Which shell serves which optimizer.

A framework is looked for in `sys.modules` only: an optimizer of a framework that was never
imported cannot exist, and importing lossscale must not import any.
"""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from typing import Any, NamedTuple

from lossscale.errors import ArgumentTypeError


class _Row(NamedTuple):
    root: str
    major_version: str
    base_class: str
    shell_module: str
    shell_class: str

    def loaded_root(self) -> Any:
        """The framework's root module, None if it is not imported in this version."""
        root = sys.modules.get(self.root)
        version = str(getattr(root, "__version__", ""))
        return root if version.startswith(f"{self.major_version}.") else None


_ROWS = (
    _Row(
        root="keras",
        major_version="3",
        base_class="optimizers.Optimizer",
        shell_module="lossscale.frameworks.keras",
        shell_class="KerasLossScaleOptimizer",
    ),
)


_COMBINED: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def shell_for(optimizer: Any) -> type[Any]:
    """Returns the shell class that wraps this optimizer.

    Raises:
        ArgumentTypeError: If it is no optimizer of a supported framework.
    """
    for row in _ROWS:
        root = row.loaded_root()
        if root is not None and isinstance(optimizer, attrgetter(row.base_class)(root)):
            return _load(row)
    raise ArgumentTypeError(_not_an_optimizer(optimizer))


def default_shell() -> type[Any]:
    """Returns the shell for a configuration, which does not say what framework it is for."""
    return _load(_ROWS[0])


def loaded_shells() -> list[type[Any]]:
    """Returns the shells of the frameworks that this process has imported."""
    return [_load(row) for row in _ROWS if row.loaded_root() is not None]


def _load(row: _Row) -> type[Any]:
    shell: type[Any] = getattr(importlib.import_module(row.shell_module), row.shell_class)
    return shell


def combined(cls: type[Any], shell: type[Any]) -> type[Any]:
    """Returns `cls` on top of a shell, for a subclass that was written for no framework."""
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_is_combined": True}
    if (cls, shell) not in _COMBINED:
        both = type(cls.__name__, (cls, shell), namespace)
        shell._register(both, cls)
        _COMBINED[cls, shell] = both
    return _COMBINED[cls, shell]


def _not_an_optimizer(optimizer: Any) -> str:
    message = (
        "The first argument must be an optimizer to wrap, an instance such as "
        f"keras.optimizers.Adam(). Received: {optimizer!r} of type {type(optimizer).__name__}."
    )
    if isinstance(optimizer, str):
        return f"{message} Use keras.optimizers.get({optimizer!r}) to make one from its name."
    if isinstance(optimizer, type):
        return f"{message} That is a class; call it: {optimizer.__name__}()."
    return message

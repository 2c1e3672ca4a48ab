"""Which shell serves which optimizer.

A framework is looked for in `sys.modules` only: an optimizer of a framework that was never
imported cannot exist, and importing lossscale must not import any.
"""

from __future__ import annotations

import functools
import importlib
import os
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
    _Row(
        root="tf_keras",
        major_version="2",
        base_class="optimizers.Optimizer",
        shell_module="lossscale.frameworks.tf_keras",
        shell_class="TFKerasLossScaleOptimizer",
    ),
    _Row(
        root="tf_keras",
        major_version="2",
        base_class="optimizers.legacy.Optimizer",
        shell_module="lossscale.frameworks.tf_keras",
        shell_class="TFKerasLegacyLossScaleOptimizer",
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


def default_shell(config: Any = None) -> type[Any]:
    """Returns the shell for what does not say what framework it is for.

    Args:
        config: A configuration of a loss scale optimizer, if there is one.

    Returns:
        The shell of tf_keras where `tf.keras` is tf_keras, where it is the only one imported, or
        where the configuration is of one of its optimizers; otherwise that of Keras 3.
    """
    keras, tf_keras = _ROWS[0], _ROWS[1]
    # TensorFlow imports Keras 3 by itself, unless this variable is set.
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if tf_keras.loaded_root() is not None and (
        legacy or keras.loaded_root() is None or _is_of_tf_keras(config)
    ):
        return _load(tf_keras)
    return _load(keras)


def _is_of_tf_keras(config: Any) -> bool:
    described = config if isinstance(config, dict) else {}
    inner = described.get("inner_optimizer", described.get("optimizer"))
    if not isinstance(inner, dict):
        return _is_tf_keras_optimizer(inner)
    settings = inner.get("config", {})
    # Each of these is written by every release of one family, and read by no optimizer of Keras 3.
    return "is_legacy_optimizer" in settings or "decay" in settings


def _is_tf_keras_optimizer(optimizer: Any) -> bool:
    return any(
        isinstance(optimizer, attrgetter(row.base_class)(row.loaded_root()))
        for row in _ROWS
        if row.root == "tf_keras" and row.loaded_root() is not None
    )


def roots() -> list[str]:
    """Returns the names of the frameworks' root modules."""
    return list(dict.fromkeys(row.root for row in _ROWS))


def shells_begun(root: str) -> bool:
    """Whether a module of shells of this framework is imported or being imported."""
    return any(row.root == root and row.shell_module in sys.modules for row in _ROWS)


def loaded_shells() -> list[type[Any]]:
    """Returns the shells of the frameworks that this process has imported."""
    return [_load(row) for row in _ROWS if row.loaded_root() is not None]


def loaded_packages() -> list[str]:
    """Returns the names of the packages of shells for what this process has imported."""
    return list(dict.fromkeys(row.shell_module for row in _ROWS if row.loaded_root() is not None))


# Cached also because AutoGraph, in a function that is being traced, cannot translate an import.
@functools.cache
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
    keras = sys.modules.get("keras")
    version = str(getattr(keras, "__version__", ""))
    if type(optimizer).__module__.startswith("keras.") and version.startswith("2."):
        return (
            f"{message} It is of Keras {version}, which is not supported. Keras 2 lives on as "
            "tf_keras: install that and import it instead, or use Keras 3."
        )
    return message

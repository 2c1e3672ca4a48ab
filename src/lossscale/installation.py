"""Making Keras and TensorFlow know lossscale: registration for files, and the documented names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lossscale import registry
from lossscale.optimizer import LossScaleOptimizer


def register() -> None:
    """Registers the optimizers with the frameworks that are imported, so that files load.

    `import lossscale` does it for Keras and tf_keras, whether they are imported before or after.

    Example:
        >>> register()
    """
    experimental = importlib.import_module("lossscale.experimental")
    for shell in registry.loaded_shells():
        registry.combined(experimental.LossScaleOptimizer, shell)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets a framework be found as without this, and registers the optimizers once it is there."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._awaited = set(roots)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns what the other finders find for an awaited module, with a changed loader."""
        if fullname not in self._awaited:
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(fullname, path, target)
            if found is not None:
                # On the loader's instance, which serves this module alone: its class stays what
                # others expect.
                loader: Any = found.loader
                run = functools.partial(self._run, fullname, loader.exec_module)
                loader.exec_module = run
                return found
        return None

    def _run(self, name: str, execute: Any, module: ModuleType) -> None:
        execute(module)
        self._awaited.discard(name)
        # Where a shell is what imports its framework, it is not complete yet.
        if not registry.shells_begun(name):
            register()


def register_later() -> None:
    """Registers the optimizers with each framework that is imported from now on."""
    roots = [root for root in registry.roots() if root not in sys.modules]
    if roots:
        sys.meta_path.insert(0, _AfterImport(roots))


# The installations that are not undone yet, and what takes the names out: the names stand as long
# as one installation asks for them, in whatever order they are undone.
_standing: list[Installation] = []
_taking_out = contextlib.ExitStack()


class Installation:
    """The documented names in TensorFlow; a context manager that takes them out again."""

    def undo(self) -> None:
        """Puts everything back as it was, unless another installation still stands.

        A second call does nothing.
        """
        if self in _standing:
            _standing.remove(self)
            if not _standing:
                _taking_out.close()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def install() -> Installation:
    """Puts the documented names back where the pages of TensorFlow have them.

    For code that must run unedited: `tf.keras.mixed_precision.LossScaleOptimizer`,
    `tf.keras.mixed_precision.experimental`, `tf.mixed_precision.experimental` and
    `tf.train.experimental` with the `LossScale` classes, and the same under `tf.compat.v1` and
    `tf.compat.v2`. Imports TensorFlow.

    Returns:
        An object whose `undo()` takes the names out again; also a context manager that does.

    Example:
        >>> import tensorflow as tf
        >>> with install():
        ...     tf.keras.mixed_precision.experimental.LossScaleOptimizer.__module__
        'lossscale.experimental.optimizer'
    """
    names = importlib.import_module("lossscale.frameworks.tensorflow.names")
    register()
    if not _standing:
        experimental = importlib.import_module("lossscale.experimental")
        loss_scales = [
            experimental.LossScale,
            experimental.FixedLossScale,
            experimental.DynamicLossScale,
        ]
        _taking_out.enter_context(
            names.put_in_place(LossScaleOptimizer, experimental.LossScaleOptimizer, loss_scales)
        )
    installation = Installation()
    _standing.append(installation)
    return installation

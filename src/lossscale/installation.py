"""Registration with Keras, so that files load; and `install`, which restores TensorFlow's names.

Files name the optimizers `lossscale>LossScaleOptimizer`. Keras 3 imports the module of an
unregistered class only from its own packages, and tf_keras only for `.keras` files. A program may
import Keras after lossscale, as isort orders them, and load a file before it creates an optimizer.
So a finder registers the classes as soon as Keras 3 or tf_keras has been imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lossscale.registry as registry
from lossscale.common import monkeypatch
from lossscale.errors import MissingPackageError
from lossscale.packages import OLD_FILES, not_installed

_OPTIMIZER_NAMES = (
    "LossScaleOptimizer",
    "LossScaleOptimizerV1",
    "LossScaleOptimizerV3",
    "lossscaleoptimizerv1",
    "lossscaleoptimizerv3",
)
"""The names of the loss scale optimizers in TensorFlow's configurations.

Keras' own class has the first name too. It cannot read these configurations; those of Keras 3 have
a module, which shows that Keras' class is meant. The first name in lower case is missing, because
Keras' `deserialize` would not find a class for it.
"""


def register() -> None:
    """Registers the optimizers with Keras 3 and tf_keras, if imported, so that files load.

    `import lossscale` calls it, whether Keras is imported before or after.

    Examples:
        >>> register()
    """
    for framework in registry.KERASES:
        # A framework that is being imported may not have `saving` yet.
        saving = getattr(framework.loaded(), "saving", None)
        if saving is None:
            continue
        # Keep registered classes: the real ones, and those of other code.
        known = saving.get_custom_objects()
        for package in ("lossscale", "lossscale.experimental"):
            reader = _reader(f"{package}.{framework.root}")
            known.setdefault(f"{package}>LossScaleOptimizer", reader)
        if framework is registry.KERAS:
            for name in _OPTIMIZER_NAMES:
                known.setdefault(name, _reader(framework.package))


@functools.cache
def _reader(package: str) -> type:
    """Returns a class whose `from_config` imports a package and uses its class."""

    def from_config(config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> object:
        cls = registry.package(package).LossScaleOptimizer
        return cls.from_config(config, custom_objects)

    return type("LossScaleOptimizer", (), {"from_config": staticmethod(from_config)})


class RegistersAfterImport:
    """A finder in `sys.meta_path` that registers the optimizers after Keras is imported."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec for Keras 3 or tf_keras; None for other modules."""
        if name == "lossscale.migration":
            raise MissingPackageError(f"There is no {name}: {OLD_FILES}")
        if name not in [framework.root for framework in registry.KERASES]:
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not cls)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            # A method of the loader's instance, which loads only this module.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Installation(monkeypatch.Installation):
    """The documented names in TensorFlow; a context manager that removes them at its end."""


# The modules that currently have the names.
_reached: set[str] = set()


def install() -> Installation:
    """Restores the names that TensorFlow documented, for code that must run unedited.

    These are `tf.keras.mixed_precision.LossScaleOptimizer`,
    `tf.keras.mixed_precision.experimental`, `tf.mixed_precision.experimental` and
    `tf.train.experimental` with the `LossScale` classes, and the same under `tf.compat.v1` and
    `tf.compat.v2`. Under `mixed_float16`, `compile` then wraps optimizers in this class too.

    The classes belong to the Keras that is `tf.keras`, such as
    `lossscale.keras.LossScaleOptimizer`, so that a program can inherit from them. `install` imports
    TensorFlow and `tf.keras`. If tf_keras is imported later alongside Keras 3, a second call adds
    the names there.

    Returns:
        An object whose `undo()` removes the names; also a context manager that does so.

    Raises:
        ImportError: If TensorFlow is not installed.

    Examples:
        >>> import tensorflow as tf
        >>> with install():
        ...     tf.keras.mixed_precision.LossScaleOptimizer.__module__
        'lossscale.keras'
    """
    try:
        put_into = importlib.import_module("lossscale.install_names").PUT_INTO
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise not_installed(["tensorflow"]) from None
    with contextlib.ExitStack() as stack:
        for name, put in put_into.items():
            # TensorFlow comes first, and imports the Keras that is `tf.keras`.
            if name in sys.modules and name not in _reached:
                put(stack)
                _reached.add(name)
                stack.callback(_reached.remove, name)
        register()
        return Installation._made(stack)

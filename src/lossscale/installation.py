"""Making Keras and TensorFlow know lossscale: registration for files, and the documented names."""

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
from lossscale.common.checks import living_wrapper
from lossscale.common.monkeypatch import DocumentedNames
from lossscale.older.configurations import OPTIMIZER_NAMES
from lossscale.optimizer import LossScaleOptimizer
from lossscale.packages import not_installed


def register() -> None:
    """Registers the optimizers with the frameworks that are imported, so that files load.

    `import lossscale` does it for Keras and tf_keras, whether they are imported before or after.

    Examples:
        >>> register()
    """
    for framework in registry.kerases():
        root = framework.loaded_root()
        # Of a framework that is being imported, not all may be there yet.
        saving = getattr(root, "saving", None)
        if saving is None:
            continue
        for name in ("lossscale", "lossscale.experimental"):
            if saving.get_registered_object(f"{name}>LossScaleOptimizer") is None:
                register_as = saving.register_keras_serializable(name, "LossScaleOptimizer")
                register_as(_reader(name, framework))
        if framework.name == "keras":
            known = saving.get_custom_objects()
            for name in OPTIMIZER_NAMES:
                # One that somebody else has registered stays theirs.
                known.setdefault(name, _reader("lossscale", framework))


@functools.cache
def _reader(package: str, framework: registry.Framework) -> type[Any]:
    """Returns a class to register: what it reads becomes a package's LossScaleOptimizer.

    That package and the framework's wrapper are imported when something is read.
    """

    def from_config(
        config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        cls = importlib.import_module(package).LossScaleOptimizer
        made: LossScaleOptimizer = cls._from_config(
            registry.first_wrapper(framework), config, custom_objects
        )
        return made

    members = {"from_config": staticmethod(from_config)}
    return type(LossScaleOptimizer.__name__, (LossScaleOptimizer,), members)


class _AfterImport:
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
        register()


def register_later() -> None:
    """Registers the optimizers with each framework that is imported from now on."""
    roots = [f.root for f in registry.kerases() if f.root not in sys.modules]
    if roots:
        sys.meta_path.insert(0, _AfterImport(roots))


# The modules that have put the names in.
_reached: set[str] = set()


class Installation(monkeypatch.Installation):
    """The documented names in TensorFlow; a context manager that takes them out again."""


def install() -> Installation:
    """Puts the documented names back where the pages of TensorFlow have them.

    For code that must run unedited: `tf.keras.mixed_precision.LossScaleOptimizer`,
    `tf.keras.mixed_precision.experimental`, `tf.mixed_precision.experimental` and
    `tf.train.experimental` with the `LossScale` classes, and the same under `tf.compat.v1` and
    `tf.compat.v2`. Under `mixed_float16`, `compile` then wraps optimizers in this class too.

    Imports TensorFlow, and `tf.keras`. What it does to tf_keras beside Keras 3 it does if tf_keras
    is imported already; a second call makes up for it.

    Returns:
        An object whose `undo()` takes the names out again; also a context manager that does.

    Raises:
        ImportError: If TensorFlow is not installed.

    Examples:
        >>> import tensorflow as tf
        >>> with install():
        ...     tf.keras.mixed_precision.experimental.LossScaleOptimizer.__module__
        'lossscale.experimental.optimizer'
    """
    tensorflow_names = "lossscale.tensorflow.names"
    try:
        importlib.import_module(tensorflow_names)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise not_installed(
            ["tensorflow"],
            purpose="lossscale.install() puts names into TensorFlow, so it",
            hint="On JAX or PyTorch without TensorFlow, use lossscale.LossScaleOptimizer by its "
            "own name.",
        ) from None
    names = _documented_names()
    with contextlib.ExitStack() as stack:
        # TensorFlow first: it imports the Keras that is `tf.keras`.
        _put_in_place(stack, tensorflow_names, names)
        register()
        for framework in registry.kerases():
            if framework.loaded_root() is not None:
                _put_in_place(stack, f"{framework.package}.installing", names)
        return Installation._made(stack)


def _put_in_place(stack: contextlib.ExitStack, module: str, names: DocumentedNames) -> None:
    if module not in _reached:
        installing: registry.Installs = importlib.import_module(module)
        stack.enter_context(installing.put_in_place(names))
        _reached.add(module)
        stack.callback(_reached.remove, module)


def _documented_names() -> DocumentedNames:
    experimental = importlib.import_module("lossscale.experimental")
    policy = importlib.import_module("lossscale.experimental.policy")

    def older(mixed_precision: Any) -> dict[str, Any]:
        optimizer = {"LossScaleOptimizer": experimental.LossScaleOptimizer}
        return {**optimizer, **policy.older_policies(mixed_precision)}

    def wrap(optimizer: Any, policy: Any) -> Any:
        # A model that is compiled anew, or another one, with an optimizer that was wrapped before.
        wrapper = living_wrapper(optimizer)
        if wrapper is not None:
            return wrapper
        if not hasattr(policy, "loss_scale"):
            return LossScaleOptimizer(optimizer)
        if policy.loss_scale is None:
            return optimizer
        return experimental.LossScaleOptimizer(optimizer, policy.loss_scale)

    return DocumentedNames(
        optimizer=LossScaleOptimizer,
        loss_scales=[
            experimental.LossScale,
            experimental.FixedLossScale,
            experimental.DynamicLossScale,
        ],
        older=older,
        wrap=wrap,
    )

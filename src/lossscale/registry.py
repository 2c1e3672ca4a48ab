"""Finds the framework of an optimizer, and the wrapper for it.

Only `sys.modules` is searched: a framework that was never imported has no optimizers, and
`import lossscale` must not import any. The package for a framework is imported when its first
optimizer is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from lossscale.errors import ArgumentTypeError, MissingPackageError
from lossscale.packages import BACKENDS, EXTRAS, is_installed, not_installed


class Framework(NamedTuple):
    """A framework whose optimizers are wrapped, and its package here.

    Attributes:
        root: Its root module.
        title: Its name in messages.
        version: The prefix of the supported versions; "" for any.
        optimizers: The base classes of its optimizers, below the root module.
        package: The package whose `LossScaleOptimizer` wraps them.
    """

    root: str
    title: str
    version: str
    optimizers: tuple[str, ...]
    package: str

    def loaded(self) -> ModuleType | None:
        """Returns the root module, None if it is not imported in a supported version."""
        root = sys.modules.get(self.root)
        return root if str(getattr(root, "__version__", "")).startswith(self.version) else None

    def has(self, optimizer: object) -> bool:
        """Whether an object is an optimizer of this framework."""
        root = self.loaded()
        bases = () if root is None else tuple(attrgetter(name)(root) for name in self.optimizers)
        return isinstance(optimizer, bases)

    def wrapper(self) -> type[Any]:
        """Returns the class that wraps its optimizers."""
        wrapper: type[Any] = package(self.package).LossScaleOptimizer
        return wrapper


KERAS = Framework("keras", "Keras 3", "3.", ("optimizers.Optimizer",), "lossscale.keras")
TF_KERAS = Framework(
    "tf_keras",
    "tf_keras",
    "2.",
    ("optimizers.Optimizer", "optimizers.legacy.Optimizer"),
    "lossscale.tf_keras",
)
KERASES = KERAS, TF_KERAS
"""The frameworks whose files contain the names of optimizers."""

FRAMEWORKS = (
    *KERASES,
    # Without Keras.
    Framework("torch", "PyTorch", "", ("optim.Optimizer",), "lossscale.torch"),
)


def framework_of(optimizer: object) -> Framework:
    """Returns the framework of an optimizer, or of those in a list.

    Raises:
        ArgumentTypeError: If it is not an optimizer of a supported framework.
    """
    first = optimizer[0] if isinstance(optimizer, (list, tuple)) and optimizer else optimizer
    for framework in FRAMEWORKS:
        if framework.has(first):
            return framework
    raise ArgumentTypeError(not_an_optimizer(optimizer))


def default_keras(config: object = None) -> Framework:
    """Returns Keras 3 or tf_keras, if the caller did not specify which.

    Args:
        config: The configuration of a loss scale optimizer, if there is one.

    Returns:
        tf_keras if `tf.keras` is tf_keras, if only tf_keras is imported, or if the configuration
        belongs to one of its optimizers; otherwise Keras 3.
    """
    # TensorFlow imports Keras 3, unless this variable is set.
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    older = TF_KERAS.loaded() is not None and (
        legacy or KERAS.loaded() is None or _is_of_tf_keras(config)
    )
    return TF_KERAS if older else KERAS


def _is_of_tf_keras(config: object) -> bool:
    described = config if isinstance(config, dict) else {}
    inner = described.get("inner_optimizer", described.get("optimizer"))
    if not isinstance(inner, dict):
        return TF_KERAS.has(inner)
    settings = inner.get("config", {})
    # Every release of one family writes these keys, and no Keras 3 optimizer reads them.
    return "is_legacy_optimizer" in settings or "decay" in settings


def is_graph_of_tensorflow_1() -> bool:
    """Whether calls build a TensorFlow 1 graph, whose variables a session initializes."""
    tf = sys.modules.get("tensorflow")
    # While TensorFlow is imported it has no such name yet.
    if tf is None or not hasattr(tf, "executing_eagerly") or tf.executing_eagerly():
        return False
    return not tf.compat.v1.get_default_graph().building_function


# Cached also because AutoGraph cannot convert an import in a function that is being traced.
@functools.cache
def package(name: str) -> ModuleType:
    """Imports a module of this library; the error names the package to install."""
    with naming_missing_packages():
        return importlib.import_module(name)


def submodule(parent: str, name: str) -> ModuleType:
    """Returns a module of a package that imports it when it is first asked for.

    Raises:
        AttributeError: If what it needs is not installed. Then `hasattr` is False, as editors,
            mocks and collectors of doctests expect; the message says what to install.
    """
    try:
        return package(f"{parent}.{name}")
    except MissingPackageError as error:
        raise AttributeError(f"module {parent!r} has no {name!r} here: {error}") from error


def imported_late(parent: str, **modules: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, for names whose modules are imported when asked for.

    Args:
        parent: The package.
        modules: The module of each name.
    """

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {parent!r} has no attribute {name!r}")
        return getattr(package(modules[name]), name)

    return attribute


@contextlib.contextmanager
def naming_missing_packages(*needed: str) -> Iterator[None]:
    """A context whose imports name the packages to install.

    Args:
        *needed: Those that it needs together, if one is missing; by default the missing one.

    Raises:
        MissingPackageError: If one is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        lacking = [each for each in needed if not is_installed(each)] or [error.name]
        if lacking == ["keras"] and not any(map(is_installed, BACKENDS)):
            # Its default backend, whose extra has Keras too.
            lacking = ["tensorflow"]
        raise not_installed(lacking) from error


def not_an_optimizer(optimizer: object) -> str:
    """Returns the message for an object that cannot be wrapped."""
    return (
        "The first argument must be an optimizer to wrap, an instance such as "
        "keras.optimizers.Adam() or torch.optim.Adam(model.parameters()). "
        f"Received: {optimizer!r} of type {type(optimizer).__name__}. Keras 2 is supported as "
        "tf_keras, and Optax by lossscale.optax.loss_scaled(optax.adamw(1e-3))."
    )

"""The one table of frameworks: which wrapper serves which optimizer, model, callback and tensor.

A framework is looked for in `sys.modules` only: an optimizer of a framework that was never
imported cannot exist, and importing lossscale must not import any. What serves a framework is named
here by its module, and imported when something of that framework arrives.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.packages import PACKAGES, is_installed, lacking_for_keras, not_installed


class Installs(Protocol):
    """What `package.installing` has for each of the `kerases`."""

    def put_in_place(self, names: Any) -> AbstractContextManager[Any]:
        """Sets the documented names; what it returns takes them out again."""


class Framework(NamedTuple):
    """A row: a framework, and what serves it in a package of its own.

    Attributes:
        name: How arguments name it.
        title: How messages name it.
        root: Its root module.
        major_version: What its version must start with; "" for any.
        package: Where the modules are that serve it.
        wrappers: Base classes of its optimizers, and the wrappers that wrap them; the package has
            these, or a module of it that is named before a dot.
        monitor: The callback that watches a run, in `package.monitor`.
    """

    name: str
    title: str
    root: str
    major_version: str
    package: str
    wrappers: tuple[tuple[str, str], ...] = ()
    monitor: str | None = None

    def loaded_root(self) -> Any:
        """The framework's root module, None if it is not imported in this version."""
        root = sys.modules.get(self.root)
        version = str(getattr(root, "__version__", ""))
        return root if version.startswith(self.major_version) else None

    def module(self, name: str) -> Any:
        """Imports a module of the package."""
        return _module(f"{self.package}.{name}")

    def serves(self, optimizer: Any) -> str | None:
        """Returns the name of the wrapper for an optimizer, None if it is of another framework."""
        root = self.loaded_root()
        for base_class, wrapper in self.wrappers if root is not None else ():
            if isinstance(optimizer, attrgetter(base_class)(root)):
                return wrapper
        return None


if TYPE_CHECKING:
    # mypy holds what stands in the rows to what is expected of it.
    from lossscale.keras import installing as keras_installing
    from lossscale.tf_keras import installing as tf_keras_installing

    _INSTALLING: tuple[Installs, ...] = (keras_installing, tf_keras_installing)

_KERAS = Framework(
    name="keras",
    title="Keras 3",
    root="keras",
    major_version="3.",
    package="lossscale.keras",
    wrappers=(("optimizers.Optimizer", "KerasLossScaleOptimizer"),),
    monitor="LossScaleMonitor",
)
_TF_KERAS = Framework(
    name="tf_keras",
    title="tf_keras",
    root="tf_keras",
    major_version="2.",
    package="lossscale.tf_keras",
    wrappers=(
        ("optimizers.Optimizer", "TFKerasLossScaleOptimizer"),
        ("optimizers.legacy.Optimizer", "TFKerasLegacyLossScaleOptimizer"),
    ),
    monitor="LossScaleMonitor",
)
_TABLE = (
    _KERAS,
    _TF_KERAS,
    Framework(
        name="tensorflow",
        title="TensorFlow",
        root="tensorflow",
        major_version="2.",
        package="lossscale.tensorflow",
    ),
    Framework(
        name="jax",
        title="JAX",
        root="jax",
        major_version="",
        package="lossscale.jax",
    ),
    Framework(
        name="torch",
        title="PyTorch",
        root="torch",
        major_version="",
        package="lossscale.torch",
        wrappers=(("optim.Optimizer", "optimizer.TorchLossScaleOptimizer"),),
    ),
)


_COMBINED: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def wrapper_for(optimizer: Any) -> type[Any]:
    """Returns the wrapper class that wraps this optimizer.

    Raises:
        ArgumentTypeError: If it is no optimizer of a supported framework.
    """
    several = isinstance(optimizer, (list, tuple)) and optimizer
    for framework in _TABLE:
        wrapper = framework.serves(optimizer[0] if several else optimizer)
        if wrapper is not None:
            return _wrapper(framework, wrapper)
    raise ArgumentTypeError(not_an_optimizer(optimizer))


def default_wrapper(config: Any = None) -> type[Any]:
    """Returns the wrapper for what does not say what framework it is for.

    Args:
        config: A configuration of a loss scale optimizer, if there is one.

    Returns:
        The wrapper of tf_keras where `tf.keras` is tf_keras, where it is the only one imported, or
        where the configuration is of one of its optimizers; otherwise that of Keras 3.
    """
    # TensorFlow imports Keras 3 by itself, unless this variable is set.
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    older = _TF_KERAS.loaded_root() is not None and (
        legacy or _KERAS.loaded_root() is None or _is_of_tf_keras(config)
    )
    return first_wrapper(_TF_KERAS if older else _KERAS)


def is_graph_of_tensorflow_1() -> bool:
    """Whether calls build a graph of TensorFlow 1, whose variables a session initializes."""
    tf: Any = sys.modules.get("tensorflow")
    # While TensorFlow is imported it has no such name yet.
    if not hasattr(tf, "executing_eagerly") or tf.executing_eagerly():
        return False
    return not tf.compat.v1.get_default_graph().building_function


def first_wrapper(framework: Framework) -> type[Any]:
    """Returns the wrapper that reads configurations of a framework."""
    return _wrapper(framework, framework.wrappers[0][1])


def _is_of_tf_keras(config: Any) -> bool:
    described = config if isinstance(config, dict) else {}
    inner = described.get("inner_optimizer", described.get("optimizer"))
    if not isinstance(inner, dict):
        return _TF_KERAS.serves(inner) is not None
    settings = inner.get("config", {})
    # Each of these is written by every release of one family, and read by no optimizer of Keras 3.
    return "is_legacy_optimizer" in settings or "decay" in settings


def _wrapper(framework: Framework, name: str) -> type[Any]:
    module, _, wrapper_name = f"{framework.package}.{name}".rpartition(".")
    wrapper: type[Any] = getattr(_module(module), wrapper_name)
    return wrapper


# Cached also because AutoGraph, in a function that is being traced, cannot translate an import.
@functools.cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in PACKAGES:
            raise not_installed(_lacking(name, error.name)) from error
        raise


def _lacking(module: str, found: str) -> list[str]:
    """What to install where a module lacks a package; others are named that it lacks as well."""
    if found == "keras":
        return lacking_for_keras()
    if module.startswith(_TF_KERAS.package):
        return [name for name in ("tf_keras", "tensorflow") if not is_installed(name)]
    return [found]


def frameworks() -> tuple[Framework, ...]:
    """Returns the whole table."""
    return _TABLE


def named(name: str) -> Framework:
    """Returns the framework that arguments name so."""
    return next(framework for framework in _TABLE if framework.name == name)


def kerases() -> tuple[Framework, ...]:
    """Returns the frameworks whose files name optimizers, and that have the documented names."""
    return _KERAS, _TF_KERAS


def monitor_for(name: str | None) -> type[Any]:
    """Returns the callback that watches runs of a framework.

    Args:
        name: Its name; None for that of `default_wrapper`.

    Raises:
        ArgumentError: If there is no such framework. It is a `ValueError`.
    """
    if name is None:
        name = default_wrapper()._framework
    known = {framework.name: framework for framework in _TABLE if framework.monitor}
    if name not in known:
        raise ArgumentError(
            f"`framework` must be one of {', '.join(map(repr, known))} or None. "
            f"Received: framework={name!r}."
        )
    found: type[Any] = getattr(known[name].module("monitor"), str(known[name].monitor))
    return found


def combined(cls: type[Any], wrapper: type[Any]) -> type[Any]:
    """Returns `cls` on top of a wrapper, for a subclass that was written for no framework."""
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_is_combined": True}
    if (cls, wrapper) not in _COMBINED:
        both = type(cls.__name__, (cls, wrapper), namespace)
        wrapper._register(both, cls)
        _COMBINED[cls, wrapper] = both
    return _COMBINED[cls, wrapper]


def not_an_optimizer(optimizer: Any) -> str:
    """Returns what is wrong with something that cannot be wrapped."""
    message = (
        "The first argument must be an optimizer to wrap, an instance such as "
        "keras.optimizers.Adam() or torch.optim.Adam(model.parameters()). "
        f"Received: {optimizer!r} of type {type(optimizer).__name__}."
    )
    if isinstance(optimizer, str):
        return f"{message} Use keras.optimizers.get({optimizer!r}) to make one from its name."
    if isinstance(optimizer, type):
        return f"{message} That is a class; call it: {optimizer.__name__}()."
    optax = sys.modules.get("optax")
    if optax is not None and isinstance(optimizer, optax.GradientTransformation):
        return (
            f"The first argument must be an optimizer that is an object. Received: a "
            f"{type(optimizer).__name__} of Optax, which is a pair of functions. Wrap it with "
            "lossscale.optax.loss_scaled(optax.adamw(1e-3)), unless it already has loss scaling."
        )
    keras = sys.modules.get("keras")
    version = str(getattr(keras, "__version__", ""))
    if type(optimizer).__module__.startswith("keras.") and version.startswith("2."):
        return (
            f"{message} It is of Keras {version}, which is not supported. Keras 2 lives on as "
            "tf_keras: install that and import it instead, or use Keras 3."
        )
    return message

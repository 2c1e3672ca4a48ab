"""The names that `lossscale.install()` puts into TensorFlow, Keras 3 and tf_keras, and where."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale import experimental, registry
from lossscale.common.checks import living_wrapper
from lossscale.common.monkeypatch import replace
from lossscale.errors import UnsupportedError
from lossscale.experimental.policy import older_policies
from lossscale.optimizer import LossScaleOptimizer

_LOSS_SCALES = (
    experimental.LossScale,
    experimental.FixedLossScale,
    experimental.DynamicLossScale,
)

# --- TensorFlow -----------------------------------------------------------------------------------


def put_into_tensorflow(stack: contextlib.ExitStack) -> None:
    """Sets every documented name under `tf`; closing the stack restores the old values."""
    from lossscale.tensorflow import private_names

    # TensorFlow imports the Keras that is `tf.keras`.
    policies = tf.keras.mixed_precision
    own = tf.keras.optimizers.Optimizer.__module__.partition(".")[0]
    framework = next(each for each in registry.KERASES if each.root == own)
    for root in (tf, tf.compat.v1, tf.compat.v2):
        _put_into_mixed_precision(stack, root.keras.mixed_precision, framework, policies)
        mixed_precision = _submodule(stack, root, "mixed_precision")
        for parent in (mixed_precision, root.train):
            _put_loss_scales(stack, _submodule(stack, parent, "experimental"))
    # The location since TensorFlow 2.4.
    _put_loss_scales(stack, tf.compat.v1.mixed_precision)
    own = private_names.own_loss_scales()
    replace(stack, own, "get", _reading_ours(own))
    # `from tensorflow.keras.mixed_precision import ...` finds another module than the attribute
    # access above.
    imported = importlib.import_module("tensorflow.keras.mixed_precision")
    _put_into_mixed_precision(stack, imported, framework, policies)


def _put_into_mixed_precision(
    stack: contextlib.ExitStack, module: Any, framework: registry.Framework, policies: Any
) -> None:
    """Sets the names in a `mixed_precision` module.

    Args:
        stack: Restores the old values when it is closed.
        module: The module.
        framework: Keras 3 or tf_keras, whose classes the names get, for programs that inherit.
        policies: The `mixed_precision` module of the same framework, with its policies.
    """
    replace(stack, module, "LossScaleOptimizer", framework.wrapper())
    older = experimental.class_for(framework)
    names = {"LossScaleOptimizer": older, **older_policies(policies)}
    for name, value in names.items():
        replace(stack, _submodule(stack, module, "experimental"), name, value)


def _put_loss_scales(stack: contextlib.ExitStack, module: Any) -> None:
    for loss_scale in _LOSS_SCALES:
        replace(stack, module, loss_scale.__name__, loss_scale)


def _submodule(stack: contextlib.ExitStack, parent: Any, name: str) -> Any:
    """Returns the module of this name in `parent`; creates an empty one if there is none."""
    found = getattr(parent, name, None)
    if found is not None:
        return found
    path = f"{parent.__name__}.{name}"
    module = types.ModuleType(path, "Names that TensorFlow documented, from lossscale.")
    replace(stack, parent, name, module)
    # `from tensorflow.keras.mixed_precision import experimental` looks here.
    if path not in sys.modules:
        sys.modules[path] = module
        stack.callback(sys.modules.pop, path, None)
    return module


def _reading_ours(own: Any) -> Callable[[Any], Any]:
    """Returns a replacement for TensorFlow's function that reads a loss scale, for ours as well."""
    get = own.get

    def get_either(identifier: Any) -> Any:
        if not isinstance(identifier, experimental.LossScale):
            return get(identifier)
        if type(identifier) not in _LOSS_SCALES:
            raise UnsupportedError(
                "TensorFlow's own loss scale optimizer does not accept a "
                f"{type(identifier).__name__} under lossscale.install(). Pass a number, 'dynamic', "
                "a FixedLossScale or a DynamicLossScale, or define that class while nothing is "
                "installed."
            )
        counterpart = getattr(own, type(identifier).__name__)
        return counterpart(**identifier.get_config())

    return get_either


# --- The class in which `compile` wraps optimizers ------------------------------------------------


class _CompileHook:
    """Replaces, in a trainer, the class in which it wraps optimizers.

    Args:
        own: The trainer's own class, whose instances are not wrapped again.
        global_policy: Returns the global policy of the trainer's framework.
    """

    def __init__(self, own: type[Any], global_policy: Callable[[], Any]) -> None:
        self._own, self._global_policy = own, global_policy

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._own)

    def __call__(self, optimizer: Any, name: str | None = None) -> Any:
        # The optimizer was wrapped before: a model is compiled again, or shares it.
        wrapper = living_wrapper(optimizer)
        if wrapper is not None:
            return wrapper
        policy = self._global_policy()
        if not hasattr(policy, "loss_scale"):
            return LossScaleOptimizer(optimizer)
        if policy.loss_scale is None:
            return optimizer
        return experimental.LossScaleOptimizer(optimizer, policy.loss_scale)


def put_into_keras(stack: contextlib.ExitStack) -> None:
    """Makes `compile` of Keras 3 wrap optimizers in the documented class."""
    import keras

    from lossscale.keras import private_names

    # Keras looks up the class by its name in this module. The public name stays Keras' own class.
    trainer = private_names.trainer()
    ours = _CompileHook(trainer.LossScaleOptimizer, keras.config.dtype_policy)
    replace(stack, trainer, "LossScaleOptimizer", ours)


def put_into_tf_keras(stack: contextlib.ExitStack) -> None:
    """Sets the documented names in tf_keras, and makes it create and read the documented class."""
    import tf_keras

    from lossscale.tf_keras import private_names

    mixed_precision = tf_keras.mixed_precision
    _put_into_mixed_precision(stack, mixed_precision, registry.TF_KERAS, mixed_precision)
    own, optimizers = private_names.loss_scaling(), private_names.optimizers()
    training, training_v1 = private_names.trainers()
    # Patches the name in each trainer's module, not the class, which other code uses too.
    for trainer, name, cls in (
        (training, "lso", "BaseLossScaleOptimizer"),
        (training_v1, "loss_scale_optimizer", "LossScaleOptimizer"),
    ):
        ours = _CompileHook(getattr(own, cls), mixed_precision.global_policy)
        replace(stack, trainer, name, types.SimpleNamespace(**{cls: ours}))

    # The last module of each is `tf.keras` if TF_USE_LEGACY_KERAS=1.
    of_tensorflow = "tf_keras.api._v2.keras"
    for name, function, modules in (
        (
            "convert_to_legacy_optimizer",
            _converting_ours(optimizers.convert_to_legacy_optimizer),
            (tf_keras.__internal__.optimizers, f"{of_tensorflow}.__internal__.optimizers"),
        ),
        (
            # Loads models and checkpoints whose configurations name tf_keras' own class.
            "deserialize",
            _making_ours(optimizers.deserialize, own.BaseLossScaleOptimizer),
            (tf_keras.optimizers, f"{of_tensorflow}.optimizers"),
        ),
    ):
        for module in (optimizers, modules[0], sys.modules.get(modules[1])):
            if module is not None:
                replace(stack, module, name, function)


def _making_ours(deserialize: Callable[..., Any], own: type[Any]) -> Callable[..., Any]:
    """Returns a replacement for tf_keras' function that creates optimizers, with our class."""

    @functools.wraps(deserialize)
    def made(*args: Any, **kwargs: Any) -> Any:
        found = deserialize(*args, **kwargs)
        if isinstance(found, own) and not isinstance(found, LossScaleOptimizer):
            return registry.TF_KERAS.wrapper().from_config(found.get_config())
        return found

    return made


def _converting_ours(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a replacement for tf_keras' function that converts optimizers to legacy ones."""
    from lossscale.tf_keras.new import AroundNew

    @functools.wraps(convert)
    def convert_to_legacy_optimizer(optimizer: Any) -> Any:
        if not isinstance(optimizer, AroundNew):
            return convert(optimizer)
        inner = convert(optimizer.inner_optimizer)
        # A copy, because two optimizers must not share one loss scale.
        arguments = copy.deepcopy(optimizer._constructor_arguments())
        return optimizer._written_class()(inner, **arguments)

    return convert_to_legacy_optimizer


PUT_INTO: dict[str, Callable[[contextlib.ExitStack], None]] = {
    "tensorflow": put_into_tensorflow,
    "keras": put_into_keras,
    "tf_keras": put_into_tf_keras,
}
"""Maps the name of each imported module to its replacement function."""

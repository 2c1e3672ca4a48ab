"""The names that `lossscale.install()` puts into TensorFlow, Keras 3 and tf_keras, and where."""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import tensorflow as tf

from lossscale import experimental, registry
from lossscale.common.private_names import private_module
from lossscale.common.replaced_names import replace
from lossscale.errors import ArgumentError
from lossscale.experimental.loss_scale import get as get_loss_scale
from lossscale.framework_types import Function, KerasOptimizer, Library, Scalar
from lossscale.optimizer import LossScaleOptimizer
from lossscale.wrapper import living_wrapper

_COMPILE = "let `compile` make the documented class under lossscale.install()"
# Below `tf.keras`, if that is tf_keras.
_IN_TENSORFLOW = "tf_keras.api._v2.keras.optimizers"
_LOSS_SCALES = (experimental.LossScale, experimental.FixedLossScale, experimental.DynamicLossScale)

# --- The dtype policy of TensorFlow 2.1 to 2.3, which had a loss scale ---------------------------


@functools.cache
def _policy_class(plain: type[Any]) -> type:
    """Returns the older `Policy` class for Keras 3 or tf_keras.

    Args:
        plain: The framework's own class of policies, which have no loss scale.
    """

    class Policy(abc.ABC):  # noqa: B024 - for `register`
        """A dtype policy with a loss scale, which `compile` uses to wrap optimizers.

        The call returns a policy of Keras' own class with two more attributes, `loss_scale` and
        `should_cast_variables`, so that files contain only the names of Keras' policies.

        Args:
            name: `"mixed_float16"`, or another name of a policy.
            loss_scale: A `LossScale`, a number, `"dynamic"`, or None for no loss scaling.
                `"auto"` means `"dynamic"` with `"mixed_float16"`, and None otherwise.

        Raises:
            ValueError: If there is no policy with this name, or the loss scale is invalid.

        Source: `tf.keras.mixed_precision.experimental.Policy`, TensorFlow 2.1 to 2.3.
        """

        def __new__(
            cls, name: str, loss_scale: Scalar | str | experimental.LossScale | None = "auto"
        ) -> Any:
            policy = plain(name)
            policy.loss_scale = _loss_scale_of(policy, loss_scale)
            policy.should_cast_variables = policy.variable_dtype != policy.compute_dtype
            return policy

    # For `isinstance`.
    Policy.register(plain)
    return Policy


def _loss_scale_of(
    policy: Any, loss_scale: Scalar | str | experimental.LossScale | None
) -> experimental.LossScale | None:
    is_float16 = policy.name == "mixed_float16"
    if isinstance(loss_scale, str) and loss_scale == "auto":
        loss_scale = "dynamic" if is_float16 else None
    if loss_scale is None:
        return None
    if not is_float16:
        raise ArgumentError(
            f"The policy {policy.name!r} takes no loss scale: compile() wraps optimizers under "
            f"'mixed_float16' only. Received: loss_scale={loss_scale!r}. Leave it out, and wrap "
            "the optimizer in a LossScaleOptimizer instead."
        )
    return get_loss_scale(loss_scale)


# --- TensorFlow -----------------------------------------------------------------------------------


def put_into_tensorflow(stack: contextlib.ExitStack) -> None:
    """Sets every documented name under `tf`; closing the stack restores the old values."""
    # TensorFlow imports the Keras that is `tf.keras`.
    policies = tf.keras.mixed_precision
    own = tf.keras.optimizers.Optimizer.__module__.partition(".")[0]
    framework = next(each for each in registry.KERASES if each.root == own)
    for root in (tf, tf.compat.v1, tf.compat.v2):
        _put_into_mixed_precision(stack, root.keras.mixed_precision, framework, policies)
        mixed_precision = _submodule(stack, root, "mixed_precision")
        for parent in (mixed_precision, root.train):
            _put_loss_scales(stack, _submodule(stack, parent, "experimental"))
    # `from tensorflow.keras.mixed_precision import ...` finds another module than the attribute
    # access above.
    imported = importlib.import_module("tensorflow.keras.mixed_precision")
    _put_into_mixed_precision(stack, imported, framework, policies)


def _put_into_mixed_precision(
    stack: contextlib.ExitStack, module: Library, framework: registry.Framework, policies: Library
) -> None:
    """Sets the names in a `mixed_precision` module.

    Args:
        stack: Restores the old values when it is closed.
        module: The module.
        framework: Keras 3 or tf_keras, whose classes the names get, for programs that inherit.
        policies: The `mixed_precision` module of the same framework, with its policies.
    """
    replace(stack, module, "LossScaleOptimizer", framework.wrapper())
    policy = _policy_class(policies.Policy)
    experimental_keras = registry.package(f"lossscale.experimental.{framework.root}")

    def set_policy(given: Any) -> None:
        policies.set_global_policy(policy(given) if isinstance(given, str) else given)

    names = {
        "LossScaleOptimizer": experimental_keras.LossScaleOptimizer,
        "Policy": policy,
        "global_policy": policies.global_policy,
        "set_policy": set_policy,
        "get_layer_policy": attrgetter("dtype_policy"),
    }
    for name, value in names.items():
        replace(stack, _submodule(stack, module, "experimental"), name, value)


def _put_loss_scales(stack: contextlib.ExitStack, module: Library) -> None:
    for loss_scale in _LOSS_SCALES:
        replace(stack, module, loss_scale.__name__, loss_scale)


def _submodule(stack: contextlib.ExitStack, parent: Library, name: str) -> Library:
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


# --- The class in which `compile` wraps optimizers ------------------------------------------------


class _CompileHook:
    """Replaces, in a trainer, the class in which it wraps optimizers.

    Args:
        own: The trainer's own class, whose instances are not wrapped again.
        global_policy: Returns the global policy of the trainer's framework.
    """

    def __init__(self, own: type, global_policy: Callable[[], Any]) -> None:
        self._own, self._global_policy = own, global_policy

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._own)

    def __call__(self, optimizer: KerasOptimizer, name: str | None = None) -> KerasOptimizer:
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

    # Its import registers the class for files.
    registry.KERAS.wrapper()
    # Keras looks up the class by its name in this module. The public name stays Keras' own class.
    trainer = private_module("keras.src.trainers.trainer", _COMPILE)
    ours = _CompileHook(trainer.LossScaleOptimizer, keras.config.dtype_policy)
    replace(stack, trainer, "LossScaleOptimizer", ours)


def put_into_tf_keras(stack: contextlib.ExitStack) -> None:
    """Sets the documented names in tf_keras, and makes it create and read the documented class."""
    import tf_keras

    mixed_precision = tf_keras.mixed_precision
    _put_into_mixed_precision(stack, mixed_precision, registry.TF_KERAS, mixed_precision)
    own = private_module("tf_keras.src.mixed_precision.loss_scale_optimizer", _COMPILE)
    optimizers = private_module("tf_keras.src.optimizers", _COMPILE)
    training = private_module("tf_keras.src.engine.training", _COMPILE)
    training_v1 = private_module("tf_keras.src.engine.training_v1", _COMPILE)
    # Patches the name in each trainer's module, not the class, which other code uses too.
    for trainer, name, cls in (
        (training, "lso", "BaseLossScaleOptimizer"),
        (training_v1, "loss_scale_optimizer", "LossScaleOptimizer"),
    ):
        ours = _CompileHook(getattr(own, cls), mixed_precision.global_policy)
        replace(stack, trainer, name, types.SimpleNamespace(**{cls: ours}))

    # Loads models and checkpoints whose configurations name tf_keras' own class.
    made = _making_ours(optimizers.deserialize, own.BaseLossScaleOptimizer)
    for name in ("tf_keras.src.optimizers", "tf_keras.optimizers", _IN_TENSORFLOW):
        if name in sys.modules:
            replace(stack, sys.modules[name], "deserialize", made)


def _making_ours(deserialize: Function, own: type[Any]) -> Function:
    """Returns a replacement for tf_keras' function that creates optimizers, with our class."""

    @functools.wraps(deserialize)
    def made(*args: Any, **kwargs: Any) -> KerasOptimizer:
        found = deserialize(*args, **kwargs)
        if isinstance(found, own) and not isinstance(found, LossScaleOptimizer):
            return registry.TF_KERAS.wrapper().from_config(found.get_config())
        return found

    return made


PUT_INTO: dict[str, Callable[[contextlib.ExitStack], None]] = {
    "tensorflow": put_into_tensorflow,
    "keras": put_into_keras,
    "tf_keras": put_into_tf_keras,
}
"""Maps the name of each imported module to its replacement function."""

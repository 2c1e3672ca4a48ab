"""Checks of the constructor's arguments, and configurations."""

from __future__ import annotations

import copy
from typing import Any

import tf_keras

import lossscale.framework_types as ft
from lossscale.arguments import check_described
from lossscale.common.private_names import private_name
from lossscale.errors import AlreadyWrappedError
from lossscale.keras_common.configs import deserialized
from lossscale.wrapper import check_not_wrapped

BaseLossScaleOptimizer: ft.Class = private_name(
    "tf_keras.src.mixed_precision.loss_scale_optimizer",
    "BaseLossScaleOptimizer",
    "see whether an optimizer has loss scaling already",
)
"""tf_keras' own class, which `lossscale.install()` replaces under its public name."""


def check_inner(inner: ft.KerasOptimizer) -> None:
    """Checks that an optimizer can be wrapped.

    Raises:
        AlreadyWrappedError: If it has loss scaling already.
    """
    check_not_wrapped(inner, BaseLossScaleOptimizer)
    if getattr(inner, "_is_wrapped_by_loss_scale_optimizer", False):
        raise AlreadyWrappedError(
            f"A LossScaleOptimizer of tf_keras already wraps this {type(inner).__name__}. Make a "
            "new optimizer to wrap."
        )


def inner_from_config(config: Any, custom_objects: dict[str, Any] | None) -> ft.KerasOptimizer:
    """Returns the inner optimizer that a configuration describes.

    Args:
        config: The configuration, or an optimizer, which is returned as it is.
        custom_objects: Classes that tf_keras does not know, by class name.
    """
    families = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    if isinstance(config, families):
        return config
    check_described(config, "inner optimizer")
    known = {**_only_new_optimizers(), **(custom_objects or {})}
    # Below an HDF5 file tf_keras looks for the class name alone.
    own = tf_keras.saving.get_registered_object(config.get("registered_name"), custom_objects)
    if own is not None:
        known[config["class_name"]] = own
    # tf_keras lower-cases the class name in the dictionary it is given.
    inner = tf_keras.optimizers.deserialize(
        copy.deepcopy(config),
        custom_objects=known,
        # Files of releases before 2.13 do not name the module of a class.
        use_legacy_format="module" not in config,
    )
    if not isinstance(inner, str):
        return inner
    return deserialized(tf_keras, inner, copy.deepcopy(config), known)


def _only_new_optimizers() -> dict[str, ft.Class]:
    """The classes that have no legacy counterpart; tf_keras' own list lacks some of them."""
    new, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
    return {
        name: cls
        for name, cls in vars(new).items()
        if isinstance(cls, type) and issubclass(cls, new.Optimizer) and not hasattr(legacy, name)
    }

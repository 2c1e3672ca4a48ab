"""What loss scale objects and files need of tf_keras, with or without an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
import tf_keras

from lossscale.arguments import check_described
from lossscale.errors import ArgumentError
from lossscale.keras_common.contract import ArrayCode
from lossscale.keras_common.loss_scales import SharedSupport
from lossscale.rules import ScaleRule
from lossscale.tensorflow import step
from lossscale.tf_keras import array_code
from lossscale.tf_keras.state import State, new_variable


class LossScaleSupport(SharedSupport):
    """Variables and constants without an optimizer, and what tf_keras' files describe."""

    _new_variable = staticmethod(new_variable)

    @staticmethod
    def _new_state(rule: ScaleRule) -> State:
        return State(rule, new_variable)

    @staticmethod
    def _constant(value: float) -> Any:
        return tf.constant(value, tf.float32)

    @staticmethod
    def _operation(done: Any) -> Any:
        """What a caller has to run for something to be done; None where it is done already."""
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            return None
        return step.grouped(done)

    @staticmethod
    def _after(done: Any, value: Any) -> Any:
        """Returns a value that is there once something was done."""
        return value if done is None else step.after(done, lambda: value)

    @classmethod
    def _array_code(cls) -> ArrayCode:
        return array_code

    @classmethod
    def _inner_from_config(cls, config: Any, custom_objects: Any) -> Any:
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
        # tf_keras' way of saying that its own list has no optimizer of this name.
        try:
            return tf_keras.saving.deserialize_keras_object(
                copy.deepcopy(config), custom_objects=known
            )
        except TypeError as error:
            raise ArgumentError(
                f"The optimizer {inner!r} in the configuration is not known. Pass its class in "
                f"custom_objects={{{inner!r}: ...}}."
            ) from error


def _only_new_optimizers() -> dict[str, type[Any]]:
    """The classes that have no legacy counterpart; tf_keras' own list lacks some of them."""
    new, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
    return {
        name: cls
        for name, cls in vars(new).items()
        if isinstance(cls, type) and issubclass(cls, new.Optimizer) and not hasattr(legacy, name)
    }

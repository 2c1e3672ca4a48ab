"""The settings of the optimizer inside, read and written through the one around it."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.common.checks import check_own_name
from lossscale.errors import ArgumentError, UnknownSettingError
from lossscale.keras.parts import Parts
from lossscale.keras_common.settings import SharedSettings

# Keras' base class sets these on every optimizer. On a wrapper they would hide the settings of
# the optimizer inside, which are the ones that have an effect.
SETTINGS_OF_THE_BASE = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)

_OWN_ATTRIBUTES = frozenset(
    {"inner_optimizer", "step_counter", "dynamic_scale", "loss_scale_state", "built", "name"}
)

_VARIABLES = ("step_counter", "dynamic_scale")


class InnerSettings(SharedSettings, Parts):
    """Hyperparameters: `momentum`, `learning_rate`, `lr`, `clipnorm` and all others."""

    _inner_attribute = "inner_optimizer"

    @property
    def loss_scale_factor(self) -> None:
        """Always None: Keras' own fixed loss scale, which this optimizer replaces."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if value is not None:
            raise ArgumentError(
                "`loss_scale_factor` would scale the loss a second time. For a fixed scale make "
                f"LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale={value!r})."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if "_lock" not in (name, *self.__dict__) and not isinstance(value, keras.Variable):
            # A subclass may set attributes before it calls Keras' constructor, as in TensorFlow.
            object.__setattr__(self, name, value)
            return
        inner = self.__dict__.get("inner_optimizer")
        if name in _VARIABLES and self.__dict__.get(name) is not None:
            raise UnknownSettingError(
                f"{name!r} is a variable. Set its value with {name}.assign({value!r})."
            )
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if inner is None or own or "_state" not in self.__dict__ or name in _OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        elif hasattr(inner, name):
            setattr(inner, name, value)
        else:
            check_own_name(inner, name, keras.optimizers)
            # Only variables are tracked, to be saved: Keras' own lists cannot be copied.
            if isinstance(value, keras.Variable):
                super().__setattr__(name, value)
            else:
                object.__setattr__(self, name, value)
            self._remember_name(name)

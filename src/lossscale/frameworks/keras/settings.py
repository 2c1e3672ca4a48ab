"""The settings of the optimizer inside, read and written through the one around it."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.errors import ArgumentError, UnknownSettingError
from lossscale.frameworks.checks import check_own_name, unknown_setting
from lossscale.frameworks.part import Part

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


class InnerSettings(Part):
    """Hyperparameters: `momentum`, `learning_rate`, `lr`, `clipnorm` and all others."""

    @property
    def lr(self) -> Any:
        """The learning rate of the inner optimizer; another name of `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

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

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found here.
        inner = self.__dict__.get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError:
            raise unknown_setting(type(self), inner, name) from None

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
            self.__dict__.setdefault("_names_of_the_user", set()).add(name)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

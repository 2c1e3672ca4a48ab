"""The settings of the optimizer inside, read and written through the one around it."""

from __future__ import annotations

from typing import Any

import tf_keras

from lossscale.frameworks.checks import check_own_name, unknown_setting
from lossscale.frameworks.part import Part


class InnerSettings(Part):
    """Hyperparameters: `momentum`, `learning_rate`, `lr`, `clipnorm` and all others."""

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer inside."""
        return self._optimizer

    @property
    def lr(self) -> Any:
        """The learning rate of the inner optimizer; another name of `learning_rate`."""
        return self._optimizer.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self._optimizer.learning_rate = value

    def __getattribute__(self, name: str) -> Any:
        # Past tf_keras, whose own passing on leaves out what an optimizer does not call a
        # hyperparameter, such as Adam's epsilon.
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found here.
        inner = self.__dict__.get("_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError:
            raise unknown_setting(type(self), inner, name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_optimizer")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if inner is None or own:
            # Past attribute tracking: what belongs into a checkpoint is named explicitly.
            object.__setattr__(self, name, value)
        elif name in getattr(inner, "_hyper", ()) or hasattr(inner, name):
            setattr(inner, name, value)
        else:
            family = tf_keras.optimizers.legacy if self._is_legacy else tf_keras.optimizers
            check_own_name(inner, name, family)
            object.__setattr__(self, name, value)
            self.__dict__.setdefault("_names_of_the_user", set()).add(name)

"""The settings of the optimizer inside, read and written through the one around it."""

from __future__ import annotations

from typing import Any

import tf_keras

from lossscale.common.checks import check_own_name
from lossscale.keras_common.settings import SharedSettings
from lossscale.tf_keras.parts import Parts


class InnerSettings(SharedSettings, Parts):
    """Hyperparameters: `momentum`, `learning_rate`, `lr`, `clipnorm` and all others."""

    _inner_attribute = "_optimizer"

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer inside."""
        return self._optimizer

    def __getattribute__(self, name: str) -> Any:
        # Past tf_keras, whose own passing on leaves out what an optimizer does not call a
        # hyperparameter, such as Adam's epsilon.
        return object.__getattribute__(self, name)

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
            self._remember_name(name)

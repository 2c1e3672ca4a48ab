"""The two documented forms of the optimizer, behind one way of making them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lossscale
from lossscale import experimental


@dataclasses.dataclass(frozen=True)
class Form:
    """One documented class; one that takes a `LossScale` has one as its `loss_scale`."""

    name: str
    cls: Any
    takes_objects: bool

    def dynamic(self, inner: Any, scale: float = 2.0**15, period: int = 2000) -> Any:
        """Returns a dynamic optimizer that starts at `scale`."""
        if self.takes_objects:
            return self.cls(inner, experimental.DynamicLossScale(scale, period))
        return self.cls(inner, initial_scale=scale, dynamic_growth_steps=period)

    def fixed(self, inner: Any, scale: float) -> Any:
        """Returns an optimizer of a fixed scale."""
        if self.takes_objects:
            return self.cls(inner, scale)
        return self.cls(inner, dynamic=False, initial_scale=scale)

    def scale_of(self, optimizer: Any) -> float:
        """Returns the loss scale now, read the way that this form documents."""
        return float(optimizer.loss_scale() if self.takes_objects else optimizer.loss_scale)


INF = float("inf")

CURRENT = Form("current", lossscale.LossScaleOptimizer, takes_objects=False)
EXPERIMENTAL = Form("experimental", experimental.LossScaleOptimizer, takes_objects=True)


def sgd(rate: float = 0.25, **settings: Any) -> Any:
    return keras.optimizers.SGD(rate, **settings)


def overflow(optimizer: Any, *variables: Any) -> None:
    """Takes a step whose gradients are not finite."""
    scaled = [optimizer.get_scaled_loss(tf.fill(v.shape, INF)) for v in variables]
    gradients = optimizer.get_unscaled_gradients(scaled)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def everything(optimizer: Any, *variables: Any) -> list[np.ndarray]:
    """Returns the values of all variables that a step can change."""
    found = [*optimizer.variables, *optimizer.inner_optimizer.variables, *variables]
    return [np.array(tf.convert_to_tensor(variable)) for variable in found]

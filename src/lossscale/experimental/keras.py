"""The loss scale optimizer of TensorFlow 2.0 to 2.3, around an optimizer of Keras 3."""

from __future__ import annotations

import keras

import lossscale.keras
from lossscale.experimental import optimizer


@optimizer.LossScaleOptimizer.register
@keras.saving.register_keras_serializable(package="lossscale.experimental")
class LossScaleOptimizer(  # type: ignore[misc]
    optimizer.LossScaleAsObject, lossscale.keras.LossScaleOptimizer
):
    """What `lossscale.experimental.LossScaleOptimizer` makes; the class to inherit from."""

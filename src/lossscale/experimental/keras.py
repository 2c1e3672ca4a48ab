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
    """The class that `lossscale.experimental.LossScaleOptimizer` creates; inherit from it."""

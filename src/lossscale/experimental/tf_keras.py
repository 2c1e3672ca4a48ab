"""The loss scale optimizer of TensorFlow 2.0 to 2.3, around an optimizer of tf_keras."""

from __future__ import annotations

import tf_keras

import lossscale.tf_keras
from lossscale.experimental import optimizer


@optimizer.LossScaleOptimizer.register
@tf_keras.saving.register_keras_serializable(package="lossscale.experimental")
class LossScaleOptimizer(  # type: ignore[misc]
    optimizer.LossScaleAsObject, lossscale.tf_keras.LossScaleOptimizer
):
    """The class that `lossscale.experimental.LossScaleOptimizer` creates; inherit from it."""

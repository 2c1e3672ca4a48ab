"""The loss scale optimizer of TensorFlow 2.0 to 2.3, around an optimizer of tf_keras."""

from __future__ import annotations

import lossscale.tf_keras as wrapper
from lossscale import experimental
from lossscale.experimental.loss_scale_as_object import LossScaleAsObject


@experimental.LossScaleOptimizer.register
@wrapper.LossScaleOptimizer._library.saving.register_keras_serializable(
    package="lossscale.experimental"
)
class LossScaleOptimizer(LossScaleAsObject, wrapper.LossScaleOptimizer):
    """The class that `lossscale.experimental.LossScaleOptimizer` creates; inherit from it."""

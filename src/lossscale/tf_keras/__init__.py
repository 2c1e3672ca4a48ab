"""tf_keras, the Keras of TensorFlow 2: its new optimizers and its legacy ones."""

from lossscale.tf_keras.for_current_optimizers import TFKerasLossScaleOptimizer
from lossscale.tf_keras.for_legacy_optimizers import TFKerasLegacyLossScaleOptimizer

__all__ = ["TFKerasLegacyLossScaleOptimizer", "TFKerasLossScaleOptimizer"]

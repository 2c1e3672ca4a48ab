"""tf_keras, the Keras of TensorFlow 2: its new optimizers and its legacy ones."""

from lossscale.frameworks.tf_keras.legacy import TFKerasLegacyLossScaleOptimizer
from lossscale.frameworks.tf_keras.new import TFKerasLossScaleOptimizer

__all__ = ["TFKerasLegacyLossScaleOptimizer", "TFKerasLossScaleOptimizer"]

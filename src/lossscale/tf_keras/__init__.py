"""tf_keras, the Keras of TensorFlow 2: its current optimizers and its legacy ones."""

from lossscale.tf_keras.current import TFKerasLossScaleOptimizer
from lossscale.tf_keras.legacy import TFKerasLegacyLossScaleOptimizer

__all__ = ["TFKerasLegacyLossScaleOptimizer", "TFKerasLossScaleOptimizer"]

"""What loss scaling needs of TensorFlow's arrays and variables for optimizers of tf_keras."""

from __future__ import annotations

import tensorflow as tf

from lossscale.frameworks.tensorflow.arrays import flat_gradients, scaled, unscaled
from lossscale.frameworks.tensorflow.finite import all_finite
from lossscale.frameworks.tensorflow.replicas import current_place, replica_count
from lossscale.frameworks.tf_keras.checks import flat_variables, is_variable

__all__ = [
    "all_finite",
    "current_place",
    "flat_gradients",
    "flat_variables",
    "is_variable",
    "read",
    "replica_count",
    "scaled",
    "unscaled",
]

read = tf.convert_to_tensor

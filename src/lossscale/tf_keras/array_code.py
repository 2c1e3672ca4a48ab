"""What loss scaling needs of TensorFlow's arrays and variables for optimizers of tf_keras."""

from __future__ import annotations

import tensorflow as tf

from lossscale.tensorflow.arrays import flat_gradients, scaled, unscaled
from lossscale.tensorflow.finite import all_finite
from lossscale.tensorflow.replicas import current_place, replica_count
from lossscale.tf_keras.checks import flat_variables, is_variable

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

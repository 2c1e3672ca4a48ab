"""Functions that Keras 3 has under the same name with other values."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="lossscale")  # type: ignore[untyped-decorator]
def hard_sigmoid(x: Any) -> Any:
    """Returns TensorFlow's hard sigmoid: 0.2 x + 0.5, between 0 and 1. Keras 3's is x / 6 + 0.5.

    Args:
        x: A tensor of any shape.

    Example:
        >>> [round(float(hard_sigmoid(x)), 1) for x in (-3.0, 0.0, 1.0)]
        [0.0, 0.5, 0.7]
    """
    return ops.clip(ops.add(ops.multiply(x, 0.2), 0.5), 0.0, 1.0)

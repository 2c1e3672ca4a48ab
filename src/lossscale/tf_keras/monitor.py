"""The monitor as a tf_keras callback."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from lossscale import callbacks
from lossscale.errors import UnsupportedError
from lossscale.tensorflow.overflow_tracker import OverflowTracker


class LossScaleMonitor(callbacks.LossScaleMonitor, tf_keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.tf_keras"

    _framework: ClassVar[str | None] = "tf_keras"
    _library = tf_keras
    _array_of = staticmethod(tf.convert_to_tensor)

    @staticmethod
    def _new_tracker() -> Any:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                "LossScaleMonitor does not work in graphs of TensorFlow 1. Leave out "
                "tf.compat.v1.disable_eager_execution(), or the monitor."
            )
        return OverflowTracker()

    @staticmethod
    def _build_tracker(model: Any) -> None:
        if model.built and model.trainable_variables:
            model.optimizer._build_overflow_tracker(model.trainable_variables)

"""The monitor as a tf_keras callback."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from lossscale import callbacks
from lossscale.errors import UnsupportedError
from lossscale.keras_common.monitor import MonitorCallback
from lossscale.tensorflow.overflow_tracker import OverflowTracker

# The name that the monitor of Keras 3 has for it.
new_tracker = OverflowTracker


class LossScaleMonitor(MonitorCallback, callbacks.LossScaleMonitor, tf_keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.tf_keras"

    _framework: ClassVar[str | None] = "tf_keras"
    _library = tf_keras
    _array_of = staticmethod(tf.convert_to_tensor)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # tf_keras then leaves `logs` on the device, where nothing waits for them. Its own
        # constructor sets the attribute too, so that one of the class would not be seen.
        self._supports_tf_logs = True

    def _instrument(self, model: Any) -> None:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                "LossScaleMonitor does not work in graphs of TensorFlow 1. Leave out "
                "tf.compat.v1.disable_eager_execution(), or the monitor."
            )
        optimizer = model.optimizer
        if optimizer._overflow_tracker is not None:
            return
        optimizer._track_overflows(new_tracker())
        if model.built and model.trainable_variables:
            with model.distribute_strategy.scope():
                optimizer._build_overflow_tracker(model.trainable_variables)
        # `fit` has already compiled its step, without the tracker.
        model.train_function = None
        model.train_function = model.make_train_function()

    def _steps(self, optimizer: Any) -> Any:
        return optimizer.iterations

    def _scales_by_itself(self, optimizer: Any) -> bool:
        return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)

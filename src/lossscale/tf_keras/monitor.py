"""The monitor as a callback of tf_keras."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import UnsupportedError
from lossscale.keras_common.monitor import MonitorBody
from lossscale.tensorflow.notes import Notes


class TFKerasLossScaleMonitor(MonitorBody, LossScaleMonitor, tf_keras.callbacks.Callback):
    __doc__ = LossScaleMonitor.__doc__

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
        if optimizer._notes is not None:
            return
        optimizer._keep_notes(Notes())
        if model.built and model.trainable_variables:
            with model.distribute_strategy.scope():
                optimizer._build_notes(model.trainable_variables)
        # `fit` has made it already, without the notes.
        model.train_function = None
        model.train_function = model.make_train_function()

    def _steps(self, optimizer: Any) -> Any:
        return optimizer.iterations

    def _scales_by_itself(self, optimizer: Any) -> bool:
        return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)

"""The monitor as a callback of tf_keras."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import UnsupportedError
from lossscale.frameworks.common.watching import Status
from lossscale.frameworks.shell.monitor import MonitorBody, check_model


class TFKerasLossScaleMonitor(MonitorBody, LossScaleMonitor, tf_keras.callbacks.Callback):
    __doc__ = LossScaleMonitor.__doc__

    _framework: ClassVar[str | None] = "tf_keras"

    # tf_keras then leaves `logs` on the device, where nothing waits for them.
    _supports_tf_logs = True

    def set_model(self, model: Any) -> None:
        """Takes the model that is trained."""
        check_model(model, tf_keras.Model, self)
        super().set_model(model)

    def _instrument(self, model: Any) -> None:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                "LossScaleMonitor does not work in graphs of TensorFlow 1. Leave out "
                "tf.compat.v1.disable_eager_execution(), or the monitor."
            )
        optimizer, every = model.optimizer, self._histograms_every()
        if optimizer._notes is not None and optimizer._notes.serves(every):
            return
        optimizer._keep_notes(every)
        if model.built and model.trainable_variables:
            with model.distribute_strategy.scope():
                optimizer._build_notes(model.trainable_variables)
        # `fit` has made it already, without the notes.
        model.train_function = None
        model.train_function = model.make_train_function()

    def _status(self) -> Status:
        optimizer = self._optimizer
        return Status(
            int(tf.convert_to_tensor(optimizer.iterations)),
            float(tf.convert_to_tensor(optimizer._current_scale())),
            int(tf.convert_to_tensor(optimizer._steps_skipped)),
            bool(tf.convert_to_tensor(optimizer._last_step_skipped)),
        )

    def _computes_in_float16(self, model: Any) -> bool:
        return any(layer.compute_dtype == "float16" for layer in model._flatten_layers())

    def _scales_by_itself(self, optimizer: Any) -> bool:
        return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)

    def _packages(self) -> tuple[str, ...]:
        return ("tf_keras", "tensorflow")

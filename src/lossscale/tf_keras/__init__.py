"""tf_keras, the Keras of TensorFlow 2: its new optimizers and its legacy ones."""

from __future__ import annotations

from lossscale import callbacks, registry

with registry.naming_missing_packages("tf_keras", "tensorflow"):
    import tf_keras

    from lossscale.keras_common.guard import guard
    from lossscale.tf_keras.optimizer import LossScaleOptimizer

__all__ = ["LossScaleMonitor", "LossScaleOptimizer", "guard"]


class LossScaleMonitor(callbacks.LossScaleMonitor, tf_keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    _library = tf_keras

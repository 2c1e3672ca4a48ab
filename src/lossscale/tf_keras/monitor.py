"""The monitor as a callback of tf_keras."""

from __future__ import annotations

import tf_keras

from lossscale import callbacks


class LossScaleMonitor(callbacks.LossScaleMonitor, tf_keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.tf_keras"

    _library = tf_keras

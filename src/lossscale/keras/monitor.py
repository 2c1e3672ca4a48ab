"""The monitor as a callback of Keras 3."""

from __future__ import annotations

import keras

from lossscale import callbacks


class LossScaleMonitor(callbacks.LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.keras"

    _library = keras

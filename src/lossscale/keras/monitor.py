"""The monitor as a Keras 3 callback."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import keras

from lossscale import callbacks
from lossscale.keras.slots import numpy_of


class LossScaleMonitor(callbacks.LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.keras"

    _framework: ClassVar[str | None] = "keras"
    _library = keras
    _array_of = staticmethod(numpy_of)

    @staticmethod
    def _new_tracker() -> Any:
        backend = keras.backend.backend()
        place = "torch.monitor" if backend == "torch" else f"{backend}.overflow_tracker"
        tracker = importlib.import_module(f"lossscale.{place}").OverflowTracker
        return tracker(_new_variable) if backend == "jax" else tracker()

    @staticmethod
    def _build_tracker(model: Any) -> None:
        if model.optimizer.built:
            model.optimizer._build_overflow_tracker()


def _new_variable(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return keras.Variable(
        initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=f"tracked_{name}"
    )

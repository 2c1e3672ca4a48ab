"""The monitor as a Keras 3 callback."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, ClassVar

import keras

from lossscale import callbacks
from lossscale.keras.slots import numpy_of
from lossscale.keras_common.monitor import MonitorCallback


class LossScaleMonitor(MonitorCallback, callbacks.LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.keras"

    _framework: ClassVar[str | None] = "keras"
    _library = keras
    _array_of = staticmethod(numpy_of)

    def _trained(self, model: Any) -> Any:
        # PyTorch's DistributedDataParallel has the model inside.
        return getattr(model, "module", model)

    def _instrument(self, model: Any) -> None:
        optimizer = model.optimizer
        if optimizer._overflow_tracker is not None:
            return
        with _scope_of(model):
            optimizer._track_overflows(new_tracker())
            if optimizer.built:
                optimizer._build_overflow_tracker()
        # `fit` has already compiled its step, without the tracker.
        model.train_function = None
        model.make_train_function()

    def _steps(self, optimizer: Any) -> Any:
        return optimizer._iterations

    def _sync(self) -> None:
        # On JAX the variables are out of date within an epoch.
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()

    def _scales_by_itself(self, optimizer: Any) -> bool:
        own = keras.optimizers.LossScaleOptimizer
        return isinstance(optimizer, own) or bool(getattr(optimizer, "loss_scale_factor", None))


def new_tracker() -> Any:
    """Returns what tracks overflows on the backend."""
    backend = keras.backend.backend()
    tracker = importlib.import_module(f"lossscale.{backend}.overflow_tracker").OverflowTracker
    return tracker(_new_variable) if backend == "jax" else tracker()


def _new_variable(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return keras.Variable(
        initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=f"tracked_{name}"
    )


def _scope_of(model: Any) -> Any:
    """Returns the scope in which to create the model's variables, for TensorFlow's strategies."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()

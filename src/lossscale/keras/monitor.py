"""The monitor as a callback of Keras 3."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import keras

from lossscale.callbacks import LossScaleMonitor
from lossscale.keras.slots import numpy_of
from lossscale.keras_common.monitor import MonitorBody


class KerasLossScaleMonitor(MonitorBody, LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = LossScaleMonitor.__doc__

    _framework: ClassVar[str | None] = "keras"
    _library = keras
    _array_of = staticmethod(numpy_of)

    def _trained(self, model: Any) -> Any:
        # PyTorch's DistributedDataParallel has the model inside.
        return getattr(model, "module", model)

    def _instrument(self, model: Any) -> None:
        optimizer = model.optimizer
        if optimizer._notes is not None:
            return
        with _scope_of(model):
            optimizer._keep_notes(_new_notes())
            if optimizer.built:
                optimizer._build_notes()
        # `fit` has made it already, without the notes.
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


def _new_notes() -> Any:
    """Returns what notes steps: of JAX in variables that compiled steps are passed."""
    backend = keras.backend.backend()
    if backend == "jax":
        from lossscale.jax.notes import Notes as NotesOfJax

        return NotesOfJax(_new_variable)
    if backend == "torch":
        from lossscale.torch.notes import Notes as NotesOfTorch

        return NotesOfTorch()
    from lossscale.tensorflow.notes import Notes as NotesOfTensorFlow

    return NotesOfTensorFlow()


def _new_variable(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return keras.Variable(
        initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=f"noted_{name}"
    )


def _scope_of(model: Any) -> Any:
    """Where variables of the model are made, under a strategy of TensorFlow on every replica."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()

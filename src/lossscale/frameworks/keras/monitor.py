"""The monitor as a callback of Keras 3."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import keras

from lossscale.callbacks import LossScaleMonitor
from lossscale.frameworks.common.watching import Status
from lossscale.frameworks.keras.weights import numpy_of
from lossscale.frameworks.shell.monitor import MonitorBody, check_model


class KerasLossScaleMonitor(MonitorBody, LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = LossScaleMonitor.__doc__

    _framework: ClassVar[str | None] = "keras"

    def set_model(self, model: Any) -> None:
        """Takes the model that is trained."""
        check_model(getattr(model, "module", model), keras.Model, self)
        super().set_model(model)

    def _instrument(self, model: Any) -> None:
        optimizer, every = model.optimizer, self._histograms_every()
        if optimizer._notes is not None and optimizer._notes.serves(every):
            return
        with _scope_of(model):
            optimizer._keep_notes(every)
        # `fit` has made it already, without the notes.
        model.train_function = None
        model.make_train_function()

    def _status(self) -> Status:
        optimizer = self._optimizer
        return Status(
            int(numpy_of(optimizer._iterations)),
            float(keras.ops.convert_to_numpy(optimizer._current_scale())),
            int(numpy_of(optimizer._steps_skipped)),
            bool(numpy_of(optimizer._last_step_skipped)),
        )

    def _sync(self) -> None:
        # On JAX the variables are out of date within an epoch.
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()

    def _computes_in_float16(self, model: Any) -> bool:
        return any(layer.compute_dtype == "float16" for layer in model._flatten_layers())

    def _scales_by_itself(self, optimizer: Any) -> bool:
        own = keras.optimizers.LossScaleOptimizer
        return isinstance(optimizer, own) or bool(getattr(optimizer, "loss_scale_factor", None))

    def _packages(self) -> tuple[str, ...]:
        return ("keras", keras.backend.backend())


def _scope_of(model: Any) -> Any:
    """Where variables of the model are made, under a strategy of TensorFlow on every replica."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()

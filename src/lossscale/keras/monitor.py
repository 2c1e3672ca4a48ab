"""The monitor as a callback of Keras 3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

import lossscale.framework_types as ft
from lossscale import callbacks
from lossscale.monitoring.explanation import Facts


class LossScaleMonitor(callbacks.LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.keras"

    _library = keras

    def _hold_batch(self) -> None:
        # There `fit` passes batches to a function in Python; TensorFlow takes them in its graph.
        if keras.backend.backend() not in ("jax", "torch"):
            return
        if self._passes is None:
            # Not before it is needed: a monitor works without the diagnosis.
            from lossscale.diagnosis.keras import KerasGradientFunction

            self._passes = KerasGradientFunction(self.model, self._settings.loss_fn)
        # Past the tracking of Keras. An exception of the step, too, leaves the model as it was.
        attributes = vars(self.model)
        step = attributes["train_function"]

        def seen(*given: Any) -> ft.Structure:
            attributes["train_function"] = step
            *state, batches = given
            return step(*state, self._held(batches))

        attributes["train_function"] = seen

    def _held(self, batches: Iterable[ft.Structure]) -> Iterable[ft.Structure]:
        """Batches of which the last that was taken is held: a list on PyTorch, or an iterator."""
        if isinstance(batches, (list, tuple)):
            self._batch = batches[-1]
            return batches

        def taken() -> Iterator[ft.Structure]:
            for self._batch in batches:
                yield self._batch

        return taken()

    def _facts(self, place: str, scale: float) -> Facts:
        if self._batch is None:
            return super()._facts(place, scale)
        batch = keras.utils.unpack_x_y_sample_weight(self._batch)
        facts: Facts = self._passes.facts(batch, scale)
        return facts

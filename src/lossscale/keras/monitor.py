"""The monitor as a callback of Keras 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from lossscale import callbacks
from lossscale.monitoring.explanation import Facts


class LossScaleMonitor(callbacks.LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    __module__ = "lossscale.keras"

    _library = keras

    # Of the step that was taken last.
    _batch: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks also that a step can be explained."""
        if self._settings.explain and _sees_batches():
            # Not before it is needed: a monitor works without the diagnosis.
            from lossscale.diagnosis.keras import check_loss_is_known

            check_loss_is_known(self.model, self._settings.loss_fn)
        super().on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Records the last step if it was not sampled, and lets go of its batch."""
        super().on_train_end(logs)
        self._batch = None

    def _hold_batch(self) -> None:
        if not _sees_batches():
            return
        # Past the tracking of Keras. An exception of the step, too, leaves the model as it was.
        attributes = vars(self.model)
        step = attributes["train_function"]

        def seen(*given: Any) -> Any:
            attributes["train_function"] = step
            *state, batches = given
            return step(*state, self._held(batches))

        attributes["train_function"] = seen

    def _held(self, batches: Any) -> Any:
        """Batches of which the last that was taken is held: a list on PyTorch, or an iterator."""
        if isinstance(batches, (list, tuple)):
            self._batch = batches[-1]
            return batches

        def taken() -> Iterator[Any]:
            for self._batch in batches:
                yield self._batch

        return taken()

    def _facts(self, place: str, scale: float) -> Facts:
        if not _sees_batches():
            return super()._facts(place, scale)
        if self._batch is None:
            return Facts(why_not=f"the training step did not take its batch from `fit`: {place}")
        from lossscale.diagnosis.keras import Batch, KerasGradientFunction

        batch = Batch(*keras.utils.unpack_x_y_sample_weight(self._batch))
        return KerasGradientFunction(self.model, self._settings.loss_fn).facts(batch, scale)


def _sees_batches() -> bool:
    """Whether `fit` passes batches to a function in Python; TensorFlow takes them in its graph."""
    return keras.backend.backend() in ("jax", "torch")

"""Model files: `.keras`, `.weights.h5` and HDF5.

In tf_keras' own files the variables of an optimizer stand at one place, numbered. There the inner
optimizer's variables are written exactly as an optimizer without loss scaling writes its own, and
the loss scale beside them. So weights go from a plain Adam into a wrapped one, and back.
"""

from __future__ import annotations

from typing import Any

import tf_keras

from lossscale.keras_common.files import SavedBesideInner, StoreOfValues, arrays_in
from lossscale.tf_keras.parts import Parts


class LossScaleStore(StoreOfValues, tf_keras.losses.Loss):
    """The place in a file where the loss scale and the counters stand, by name."""


class KerasFiles(SavedBesideInner, Parts):
    """`save_own_variables` and `load_own_variables`."""

    _waiting: list[Any] | None

    @property
    def loss_scale_state(self) -> LossScaleStore:
        """Where files keep the loss scale and the counters."""
        # Made anew: as an attribute it would be a child in checkpoints.
        return LossScaleStore(self._own_values, self._set_own_values)

    def save_own_variables(self, store: Any) -> None:
        """Writes the inner optimizer's variables as an optimizer without loss scaling does."""
        self._optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads the inner optimizer's variables.

        Args:
            store: A place of a file that was written by this class, by tf_keras' own, or by an
                optimizer without loss scaling. Before `build` the values wait for it.
        """
        values = arrays_in(store)
        if values:
            self._waiting = [values[str(i)] for i in range(len(values))]
            self._load_what_waited()

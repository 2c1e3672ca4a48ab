"""Model files: `.keras`, `.weights.h5` and HDF5.

In tf_keras' own files the variables of an optimizer stand at one place, numbered. There the inner
optimizer's variables are written exactly as an optimizer without loss scaling writes its own, and
the loss scale beside them. So weights go from a plain Adam into a wrapped one, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tf_keras

from lossscale.frameworks.tf_keras.parts import Parts


class LossScaleStore(tf_keras.losses.Loss):
    """The place in a file where the loss scale and the counters stand, by name.

    It is a Loss only because tf_keras saves nothing but layers, optimizers, metrics and losses.

    Args:
        read: Returns the values to write, by name.
        write: Takes the values that were read, by name.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(name="loss_scale_state")
        self._read = read
        self._write = write

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Computes nothing; nobody compiles a model with it."""
        raise NotImplementedError

    def save_own_variables(self, store: Any) -> None:
        """Writes the values into a place of a file."""
        for name, value in self._read().items():
            store[name] = value

    def load_own_variables(self, store: Any) -> None:
        """Reads them; a file of an optimizer without loss scaling has none."""
        # A place in an HDF5 file is no Mapping and yields no items.
        values = {name: np.array(store[name]) for name in store.keys()}  # noqa: SIM118
        if values:
            self._write(values)


class KerasFiles(Parts):
    """`save_own_variables` and `load_own_variables`."""

    _waiting: list[Any] | None

    @property
    def loss_scale_state(self) -> LossScaleStore:
        """Where files keep the loss scale and the counters."""
        # Made anew: as an attribute it would be a child in checkpoints.
        return LossScaleStore(self._own_values, self._set_own_values)

    def __dir__(self) -> list[str]:
        # tf_keras saves every object that dir() names and that can be saved. The inner
        # optimizer's variables are written by this class; named here, they would stand in the
        # file twice, and a file of a plain optimizer would be missing the second copy. TensorFlow
        # asks dir() for get_slot_names, and writes no checkpoint if slots are attributes as well.
        hidden = {"inner_optimizer", "get_slot_names"}
        return [name for name in super().__dir__() if name not in hidden]

    def save_own_variables(self, store: Any) -> None:
        """Writes the inner optimizer's variables as an optimizer without loss scaling does."""
        self._optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads the inner optimizer's variables.

        Args:
            store: A place of a file that was written by this class, by tf_keras' own, or by an
                optimizer without loss scaling. Before `build` the values wait for it.
        """
        values = {key: np.array(store[key]) for key in store.keys()}  # noqa: SIM118
        if values:
            self._waiting = [values[str(i)] for i in range(len(values))]
            self._load_what_waited()

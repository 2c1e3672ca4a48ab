"""The place in a model file where the loss scale and the counters stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from lossscale.keras_common.parts import SharedParts


class StoreOfValues:
    """Values in a file, by name. The libraries save only what is one of their own classes.

    So each has a subclass that is a Loss, too: of what they save, a loss is the least.

    Args:
        read: Returns the values to write, by name.
        write: Takes the values that were read, by name.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(name="loss_scale_state")  # type: ignore[call-arg]
        # Callables and not the optimizer: Keras walks into every attribute that can be saved.
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
        values = arrays_in(store)
        if values:
            self._write(values)


class SavedBesideInner(SharedParts):
    """What Keras' files see of an optimizer."""

    # Keras saves every object that dir() names and that can be saved. The inner optimizer's
    # variables are written by the optimizer around it; named here, they would stand in the file
    # twice, and a file of a plain optimizer would be missing the second copy. TensorFlow asks
    # dir() for get_slot_names, and writes no checkpoint if slots are attributes as well.
    _hidden: ClassVar[frozenset[str]] = frozenset({"inner_optimizer", "get_slot_names"})

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._hidden]


def arrays_in(store: Any) -> dict[str, Any]:
    """Returns what stands in a place of a file, as arrays by name."""
    # A place in an HDF5 file is no Mapping and yields no items.
    return {key: np.array(store[key]) for key in store.keys()}  # noqa: SIM118

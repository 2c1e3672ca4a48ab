"""Reading checkpoints of TensorFlow 2.0 to 2.2.

There the inner optimizer stands below the loss scale optimizer, as `base_optimizer`, and its slots
belong to that child. Since 2.3 the two are one node, with an empty child of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale.tensorflow.private_names import Trackable

# What the new optimizers call the variables of the older ones.
_NEW_NAMES = {"iter": "_iterations", "learning_rate": "_learning_rate"}


class OlderBaseOptimizer(Trackable):
    """Restores an optimizer from that child, and writes nothing.

    Args:
        optimizer: The inner optimizer.
        is_legacy: Whether its variables have the names of that time.
        find_slot: Returns the slot of a variable by name, or None.
    """

    def __init__(
        self, optimizer: Any, is_legacy: bool, find_slot: Callable[[Any, str], Any]
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._is_legacy = is_legacy
        self._find_slot = find_slot

    @property
    def _deferred_dependencies(self) -> Any:
        # A legacy optimizer makes its variables late, and then looks here for their values.
        return self._optimizer._deferred_dependencies

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        name = name if self._is_legacy else _NEW_NAMES.get(name, name)
        return self._optimizer._lookup_dependency(name)

    def _create_or_restore_slot_variable(self, **position: Any) -> Any:
        slot = self._find_slot(position["variable"], position["slot_name"])
        if slot is not None:
            return slot
        # A legacy optimizer makes it now; a new one cannot, and says so.
        return self._optimizer._create_or_restore_slot_variable(**position)

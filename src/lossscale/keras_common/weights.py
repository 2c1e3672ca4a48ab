"""The documented view of an optimizer's variables, as far as the generations share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lossscale.errors import ArgumentError, UnknownSlotError
from lossscale.keras_common.parts import SharedParts

Slots = Iterator[tuple[list[str], dict[Any, Any]]]
"""The names of each kind of slot, and its variables by the key of the reference variable."""


class SharedWeights(SharedParts):
    """`get_slot`, `add_slot`, and what decides about weight decay."""

    def get_slot_names(self) -> list[str]:
        raise NotImplementedError

    def get_slot(self, var: Any, slot_name: str) -> Any:
        slot = self._find_slot(var, slot_name)
        if slot is None:
            raise UnknownSlotError(
                f"{type(self.inner_optimizer).__name__} has no slot {slot_name!r} for the "
                f"variable {var.name!r}. Its slots are {self.get_slot_names()}; they exist for "
                "the variables it was built with."
            )
        return slot

    def add_slot(self, var: Any, slot_name: str, initializer: Any = "zeros") -> Any:
        slot = self._find_slot(var, slot_name)
        if slot is None:
            slot = self._new_slot(var, slot_name, initializer)
            self._added_slots[slot_name, self.inner_optimizer._var_key(var)] = slot
        return slot

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def _find_slot(self, var: Any, slot_name: str) -> Any:
        wanted = self._names_of_slot(slot_name)
        key = self.inner_optimizer._var_key(var)
        for names, slots in self._slots():
            if wanted & set(names) and key in slots:
                return slots[key]
        return None

    def _slots(self) -> Slots:
        """Yields the names of each kind of slot and its variables by reference variable."""
        yield from self._slots_of_inner()
        by_name: dict[str, dict[Any, Any]] = {}
        for (name, key), slot in self._added_slots.items():
            by_name.setdefault(name, {})[key] = slot
        for name, slots in by_name.items():
            yield [name], slots

    # What differs.

    def _slots_of_inner(self) -> Slots:
        """Yields the slots that the inner optimizer made."""
        raise NotImplementedError

    def _names_of_slot(self, slot_name: str) -> set[str]:
        """Returns all names of a kind of slot."""
        return {slot_name}

    def _new_slot(self, var: Any, slot_name: str, initializer: Any) -> Any:
        """Returns a new state variable of the inner optimizer, of the shape of another one."""
        raise NotImplementedError


def check_shapes(variables: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Checks that arrays fit to variables, before any is set.

    Raises:
        ArgumentError: If one does not. It is a `ValueError`.
    """
    for variable, shape in zip(variables, shapes, strict=True):
        if tuple(variable.shape) != shape:
            raise ArgumentError(
                f"The weight {variable.name!r} has the shape {tuple(variable.shape)}. "
                f"Received: an array of shape {shape}. Nothing was changed."
            )

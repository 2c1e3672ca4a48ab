"""Copying and pickling: an optimizer is made anew, from configurations and arrays."""

from __future__ import annotations

import copy
from typing import Any

from lossscale.keras_common.parts import SharedParts


class Copies(SharedParts):
    """`__deepcopy__` and `__reduce__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        rebuild, arguments = self.__reduce__()
        other = rebuild(*copy.deepcopy(arguments, memo))
        self._build_alike(other)
        memo[id(self)] = other
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        inner = self.inner_optimizer
        return _rebuild, (
            _written_class(type(self)),
            type(inner),
            inner.get_config(),
            self._constructor_arguments(),
            self._inner_values(),
            self._own_values(),
            {name: getattr(self, name) for name in self.__dict__.get("_names_of_the_user", ())},
        )

    def _constructor_arguments(self) -> dict[str, Any]:
        return {"rule": self._rule, "name": self.__dict__.get("_given_name", self.name)}

    # What differs.

    def _build_alike(self, other: Any) -> None:
        """Builds a copy for the same variables: an optimizer knows them by identity."""
        raise NotImplementedError

    def _inner_values(self) -> Any:
        """Returns the inner optimizer's variables as arrays that nothing changes."""
        raise NotImplementedError

    def _take_inner_values(self, values: Any) -> None:
        """Sets them, or keeps them until the variables exist that they belong to."""
        raise NotImplementedError


def _rebuild(
    cls: type[Any],
    inner_class: type[Any],
    inner_config: dict[str, Any],
    arguments: dict[str, Any],
    inner_values: Any,
    own_values: dict[str, Any],
    attributes: dict[str, Any],
) -> Any:
    optimizer = cls(inner_class.from_config(inner_config), **arguments)
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    optimizer._set_own_values(own_values)
    optimizer._take_inner_values(inner_values)
    return optimizer


def _written_class(cls: type[Any]) -> type[Any]:
    """The class as it stands in a module, for one that was combined with a shell."""
    return cls.__mro__[1] if vars(cls).get("_is_combined") else cls

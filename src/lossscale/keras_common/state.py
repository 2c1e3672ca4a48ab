"""The variables of a rule's state, and their place in a model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import lossscale.framework_types as ft
from lossscale.errors import ArgumentError
from lossscale.packages import warn
from lossscale.rules import ScaleRule


class ScaleVariables:
    """A rule and the variables that hold its state.

    Args:
        rule: The rule that moves the state.
        names: The fields that are kept, and their names in files.
        new_variable: Makes a scalar variable of a name, a kind of number and a first value.

    Attributes:
        first: The first state, as Python numbers.
        variables: A variable for each field that is kept.
    """

    # Whether to apply the gradients of a step; None where they need only be finite.
    decide: Callable[[list[ft.Gradient]], ft.Scalar] | None = None
    # Returns the value of a variable as a tensor that does not change with it.
    _read: Callable[[ft.Variable], ft.Tensor]
    # Sets the state; returns the operation that does it in a graph of TensorFlow.
    write: Callable[[ft.RuleState], ft.Operation]
    # The array functions for `ScaleRule.update`.
    _namespace: object

    def __init__(
        self, rule: ScaleRule, names: dict[str, str], new_variable: Callable[..., ft.Variable]
    ) -> None:
        self.rule, self.names, self.variables = rule, names, dict[str, ft.Variable]()
        self.first: ft.RuleState = rule.init()
        for field, name in names.items():
            value = getattr(self.first, field)
            whole = "bool" if isinstance(value, bool) else "int"
            kind = whole if isinstance(value, int) else "float32"
            self.variables[field] = new_variable(name, kind, value)

    def read(self) -> ft.RuleState:
        """Returns the state as tensors; of a fixed scale, as Python numbers of the program."""
        if not self.rule.is_dynamic:
            # A restored file must not override the number in the program.
            return self.first
        return self.first._replace(
            **{field: self._read(variable) for field, variable in self.variables.items()}
        )

    def update(self, finite: ft.Scalar) -> ft.Operation:
        """Updates the state after a step; returns what `write` does, None if nothing changes."""
        before = self.read()
        after = self.rule.update(before, finite, xp=self._namespace)
        return None if after is before else self.write(after)

    @property
    def named(self) -> dict[str, ft.Variable]:
        """The variables by their names in files."""
        return {name: self.variables[field] for field, name in self.names.items()}

    def restored(self, values: Mapping[str, Any]) -> ft.RuleState:
        """Returns a state of Python numbers from a file, brought into the rule's range.

        Args:
            values: Arrays by name; a missing field is that of the first state.
        """
        saved = {f: values[name].item() for f, name in self.names.items() if name in values}
        state = self.rule.restored(self.first._replace(**saved))
        scale = saved.get("scale", state.scale)
        if self.rule.is_dynamic and np.float32(scale) != np.float32(state.scale):
            warn(
                f"The saved loss scale, {scale}, is outside the range of {self.rule}. Training "
                f"continues with {state.scale}."
            )
        return state


class ValueStore:
    """Values in a model file, by name.

    Keras 3 and tf_keras save only objects of their own classes, so each has a subclass of this that
    is also a Loss, the simplest of these classes.

    Args:
        read: Returns the values to write, by name.
        write: Sets the values that were read, by name.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(name="loss_scale_state")  # type: ignore[call-arg]  # of the next base
        # Callables and not the optimizer: Keras walks into every attribute that can be saved.
        self._read = read
        self._write = write

    def save_own_variables(self, store: ft.Store) -> None:
        """Writes the values to a place in a file."""
        for name, value in self._read().items():
            store[name] = value

    def load_own_variables(self, store: ft.Store) -> None:
        """Reads the values; a file of an optimizer without loss scaling has none."""
        values = arrays_in(store)
        if values:
            self._write(values)


class AttributesOfInner:
    """The inner optimizer as Keras walks through it for a file, without its own variables.

    A subclass is also a Loss, as of `ValueStore`.

    Args:
        inner: The inner optimizer.
    """

    def __init__(self, inner: ft.KerasOptimizer) -> None:
        # Without the attributes of a Loss, whose names an optimizer may have.
        self.__inner = inner

    def __dir__(self) -> list[str]:
        return dir(self.__inner)

    def __getattr__(self, name: str) -> Any:
        found = None if name.endswith("_own_variables") else getattr(self.__inner, name)
        if found is None or _holds_variables_of(found, self.__inner):
            # The optimizer around it writes these with its own.
            raise AttributeError(name)
        return found

    def _obj_type(self) -> str:
        # Keras 3 saves no attribute that each object of this type has.
        return "Optimizer"


def parts_of(attribute: object) -> list[Any]:
    """The objects in a dictionary, list, tuple or set; of anything else the object itself."""
    if isinstance(attribute, dict):
        return list(attribute.values())
    return list(attribute) if isinstance(attribute, (list, tuple, set)) else [attribute]


def _holds_variables_of(found: object, inner: ft.KerasOptimizer) -> bool:
    """Whether an attribute holds optimizers whose variables the inner one lists, and no others."""
    ids = [_ids_of_variables(each) for each in parts_of(found)]
    return any(ids) and set().union(*ids) <= _ids_of_variables(inner)


def _ids_of_variables(owner: object) -> set[int]:
    variables = getattr(owner, "variables", ())
    return {id(variable) for variable in (variables() if callable(variables) else variables)}


def deserialized(
    library: ft.Library, name: str, config: ft.Config, custom_objects: Mapping[str, Any] | None
) -> ft.KerasOptimizer:
    """Returns the optimizer of a configuration that is not in its library's own list of names.

    Args:
        library: `keras` or `tf_keras`.
        name: The value that the library returned in place of the optimizer.
        config: The configuration.
        custom_objects: Classes that the library does not know, by class name.

    Raises:
        ArgumentError: If its class is not known.
    """
    try:
        return library.saving.deserialize_keras_object(config, custom_objects=custom_objects)
    except TypeError as error:
        raise ArgumentError(
            f"The optimizer {name!r} in the configuration is not known. Pass its class in "
            f"custom_objects={{{name!r}: ...}}."
        ) from error


def numbered_in(store: ft.Store) -> list[ft.Array]:
    """Returns the arrays in a place of a file whose names are their numbers.

    Raises:
        ArgumentError: If one is missing.
    """
    arrays = arrays_in(store)
    numbers = [str(number) for number in range(len(arrays))]
    if missing := sorted(set(numbers) - arrays.keys()):
        raise ArgumentError(
            f"The saved state of the optimizer is damaged: it has no array {missing[0]!r}. "
            f"Received: the arrays {sorted(arrays)}. Nothing was changed."
        )
    return [arrays[number] for number in numbers]


def arrays_in(store: ft.Store) -> dict[str, ft.Array]:
    """Returns the arrays in a place of a file, by name."""
    # A place in an HDF5 file is no Mapping and yields no items.
    return {key: np.array(store[key]) for key in store.keys()}  # noqa: SIM118

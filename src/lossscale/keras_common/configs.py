"""Copies and configurations of the optimizers of Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

import lossscale.framework_types as ft
from lossscale.arguments import arguments_from_config, check_config, config_from_rule
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.wrapper import Wrapper


class WithConfig(Wrapper):
    """Configurations, and what is written in place of a copy."""

    # The module `keras` or `tf_keras`.
    _library: ClassVar[ft.Library]
    # How to give the state of an optimizer `old` to a `new` one.
    _lines_of_a_copy: ClassVar[tuple[str, str]]
    # The inner optimizer of a configuration, given classes by name.
    _inner_from_config: Callable[[Any, dict[str, Any] | None], ft.KerasOptimizer]

    def __reduce__(self) -> NoReturn:
        lines = ("new = type(old).from_config(old.get_config())", *self._lines_of_a_copy)
        raise UnsupportedError(
            "A LossScaleOptimizer cannot be copied or pickled; its model can. For a second "
            "optimizer with the same state, write:\n    " + "\n    ".join(lines)
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def _constructor_arguments(self) -> dict[str, Any]:
        """Returns the other arguments of the constructor, to recreate this optimizer."""
        return {"rule": self._rule, "name": self.__dict__.get("_given_name", self.name)}

    def get_config(self) -> ft.Config:
        """Returns the configuration: a JSON-ready dictionary, without the state."""
        name, described = self._constructor_arguments()["name"], config_from_rule(self._rule)
        if "rule" in described:
            described["rule"]["class_name"] = self._registered_name(type(self._rule))
        return {
            **({} if name is None else {"name": name}),
            "inner_optimizer": self._library.optimizers.serialize(self.inner_optimizer),
            **described,
        }

    @classmethod
    def from_config(cls, config: ft.Config, custom_objects: dict[str, Any] | None = None) -> Self:
        """Creates an optimizer from its configuration, without saved state.

        Args:
            config: A dictionary from `get_config`; it is not changed.
            custom_objects: Classes in the configuration that are not part of the framework, by
                class name.

        Returns:
            An optimizer instance.

        Raises:
            ValueError: If `config` does not describe a loss scale optimizer.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> lossscale.LossScaleOptimizer.from_config(optimizer.get_config()).initial_scale
            8.0
        """
        check_config(config)
        rules = cls._with_class_named(config.get("rule"), custom_objects)
        inner, arguments = arguments_from_config(config, rules)
        return cls._made(cls._inner_from_config(inner, custom_objects), **arguments)

    @classmethod
    def _made(cls, inner: ft.KerasOptimizer, **arguments: Any) -> Self:
        """Returns an object; the inner optimizer comes first, as in both libraries."""
        return cls(inner, **arguments)

    @classmethod
    def _registered_name(cls, named: ft.Class) -> str:
        """Returns the name by which a configuration can name a class."""
        return str(cls._library.saving.get_registered_name(named))

    @classmethod
    def _with_class_named(cls, described: Any, custom_objects: Any) -> dict[str, Any]:
        """Returns `custom_objects` with the class that `described` names, if it is registered.

        Keras does not pass its registry and the `custom_objects` of `load_model` on.
        """
        name = described.get("class_name") if isinstance(described, dict) else None
        registered = cls._library.saving.get_registered_object(name, custom_objects)
        return {**(custom_objects or {}), **({} if registered is None else {name: registered})}


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

"""What loss scale objects and files need of a generation of Keras, with or without an optimizer."""

from __future__ import annotations

from typing import Any

from lossscale.keras_common.parts import SharedParts


class SharedSupport(SharedParts):
    """Finite checks without an optimizer, and the registry of the library."""

    @staticmethod
    def _operation(done: Any) -> Any:
        """What a caller has to run for something to be done: nothing."""
        return None

    @staticmethod
    def _after(done: Any, value: Any) -> Any:
        """Returns a value that is there once something was done."""
        return value

    @classmethod
    def _flat_gradients(cls, gradients: Any) -> list[Any]:
        return cls._array_code().flat_gradients(gradients)

    @classmethod
    def _all_finite(cls, gradients: list[Any]) -> Any:
        return cls._array_code().all_finite(gradients)

    @classmethod
    def _registered_name(cls, named: type[Any]) -> str:
        """Returns the name by which a configuration can name a class."""
        name: str = cls._library.saving.get_registered_name(named)
        return name

    @classmethod
    def _with_class_named(cls, described: Any, custom_objects: Any) -> dict[str, Any]:
        """Returns `custom_objects` and the class that `described` names, if the library knows it.

        Keras passes its own registry and the `custom_objects` of `load_model` to nobody.
        """
        name = described.get("class_name") if isinstance(described, dict) else None
        found = cls._library.saving.get_registered_object(name, custom_objects)
        return {**(custom_objects or {}), **({} if found is None else {name: found})}

    @classmethod
    def _register(cls, combined: type[Any], written: type[Any]) -> None:
        """Lets files name a class that was combined with a shell."""
        saving = cls._library.saving
        package, _, name = saving.get_registered_name(written).rpartition(">")
        package = package or vars(written).get("_package_in_files")
        if package:
            saving.register_keras_serializable(package=package, name=name)(combined)

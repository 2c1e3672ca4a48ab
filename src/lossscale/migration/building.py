"""Builds the Keras 3 model that a Keras 2 configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lossscale.errors import OldFileError
from lossscale.migration.functional import FunctionalCalls
from lossscale.migration.layers import (
    ConvertedLayer,
    is_container,
    known_settings,
    layer_name,
    made_by_keras,
    name_of,
    successor,
    unpacked,
)

_FUNCTIONAL = ("Functional", "Model")

_WITH_VOCABULARY = ("IntegerLookup", "StringLookup", "TextVectorization")

# Settings that are layers themselves.
_INNER_LAYERS = ("layer", "backward_layer", "cell", "cells")


class ModelBuilder:
    """Builds Keras 3 layers and models from Keras 2 configurations.

    Args:
        path: The file, for messages.
        custom_objects: The caller's classes and functions, by name.
    """

    def __init__(self, path: str, custom_objects: Mapping[str, Any]) -> None:
        self.path = path
        self.custom_objects = custom_objects
        # The layers of each model in the order of the file, by the model's identity.
        self.parts: dict[int, list[ConvertedLayer]] = {}

    def model(self, described: dict[str, Any]) -> Any:
        """Returns the model that the outermost configuration of a file describes.

        Raises:
            OldFileError: If Keras 3 cannot build it. The message names the layer.
        """
        kind = described["class_name"].rpartition(">")[2]
        if is_container(described) and self._container_class(described, kind) is not None:
            return self._container(described, kind)
        raise OldFileError(
            f"{self.path}: cannot rebuild the model {name_of(described)!r}: its class {kind!r} is "
            f"not in the file. If the model is functional, pass custom_objects={{{kind!r}: "
            "keras.Model}. Otherwise write it for Keras 3 and restore a checkpoint with "
            "restore_checkpoint."
        )

    def layer(self, described: dict[str, Any]) -> Any:
        """Returns the layer or model that a configuration describes."""
        written, settings = described["class_name"], described["config"]
        kind = written.rpartition(">")[2]
        what = f"{self.path}: the layer {name_of(described)!r} ({kind})"
        import keras

        given = self.custom_objects.get(name_of(described))
        if isinstance(given, keras.layers.Layer):
            return given
        own = self._own_class(described)
        if is_container(described) and self._container_class(described, kind) is not None:
            return self._container(described, kind)
        with made_by_keras(what):
            if kind == "Lambda" and own is None:
                return self._lambda(settings, what)
            if own is not None:
                return own.from_config({**settings, **_own_dtype(kind, settings)})
            if kind in _WITH_VOCABULARY and settings.get("vocabulary", "") is None:
                raise OldFileError(
                    f"{what} keeps its vocabulary in a separate file. Create the layer in Keras 3 "
                    f"with its vocabulary, and pass it as custom_objects={{{name_of(described)!r}: "
                    "layer}."
                )
            other, settings = successor(kind, settings)
            cls: Any = getattr(keras.layers, other, None)
            if not callable(cls):
                raise OldFileError(
                    f"{what} does not exist in Keras 3. Write a Keras 3 layer that does the same, "
                    "with its weights in the same order, and pass it as "
                    f"custom_objects={{{kind!r}: YourLayer}}."
                )
            settings = known_settings(cls, settings, what)
            inner = {n: self._inner(settings[n]) for n in _INNER_LAYERS if settings.get(n)}
            return cls(**{**settings, **inner}) if inner else cls.from_config(settings)

    def _inner(self, described: Any) -> Any:
        if isinstance(described, (list, tuple)):
            return [self._inner(one) for one in described]
        return self.layer(described)

    def _lambda(self, settings: dict[str, Any], what: str) -> Any:
        import keras

        function = settings.get("function")
        known = keras.saving.get_custom_objects() | dict(self.custom_objects)
        names = [settings.get("name"), _name_of(function)]
        found = next((known[name] for name in names if name in known), None)
        if found is None:
            raise OldFileError(
                f"{what} holds a Python function, which cannot be read from the file safely. Pass "
                f"it as custom_objects={{{names[1] or names[0]!r}: function}}."
            )
        shape = settings.get("output_shape")
        return keras.layers.Lambda(
            found,
            output_shape=tuple(shape) if isinstance(shape, list) else None,
            arguments=settings.get("arguments") or None,
            name=layer_name(settings["name"]),
        )

    # --- Models -------------------------------------------------------------------------------

    def _container_class(self, described: dict[str, Any], kind: str) -> Any:
        import keras

        own = self._own_class(described)
        if own is not None:
            return own
        if kind in _FUNCTIONAL:
            return keras.Model
        return keras.Sequential if kind == "Sequential" else None

    def _container(self, described: dict[str, Any], kind: str) -> Any:
        cls = self._container_class(described, kind)
        if "input_layers" in described["config"]:
            return self._functional(cls, described["config"])
        return self._sequential(cls, described)

    def _sequential(self, cls: Any, described: dict[str, Any]) -> Any:
        import keras

        config = described["config"]
        # The first releases wrote only the list, without a dictionary around it.
        layers = config if isinstance(config, list) else config["layers"]
        named = {} if isinstance(config, list) else {"name": layer_name(config["name"])}
        model, parts = cls(**named), []
        for number, one in enumerate(layers):
            shape = one["config"].get("batch_input_shape") if number == 0 else None
            if shape is not None and one["class_name"] != "InputLayer" and not is_container(one):
                first = f"{name_of(one)}_input"
                model.add(keras.Input(batch_shape=tuple(shape), name=layer_name(first)))
            if one["class_name"] == "InputLayer":
                tensor = self._input(one["config"])
                model.add(tensor)
                parts.append(ConvertedLayer(name_of(one), "InputLayer", tensor._keras_history[0]))
                continue
            layer = self.layer(one)
            with made_by_keras(f"{self.path}: the layer {name_of(one)!r}"):
                model.add(layer)
            parts.append(ConvertedLayer(name_of(one), one["class_name"], layer))
        self.parts[id(model)] = parts
        shape = (described.get("build_config") or {}).get("input_shape")
        if isinstance(config, dict):
            shape = config.get("build_input_shape") or shape
        if not model.built and shape:
            with made_by_keras(f"{self.path}: the model {model.name!r}"):
                model.build(tuple(shape))
        if isinstance(config, dict) and config.get("trainable") is False:
            model.trainable = False
        return model

    def _functional(self, cls: Any, config: dict[str, Any]) -> Any:
        calls = FunctionalCalls(config, self.path, self.layer, self._input)
        calls.run()
        inputs = calls.tensors(config["input_layers"])
        outputs = calls.tensors(config["output_layers"])
        with made_by_keras(f"{self.path}: the model {config.get('name')!r}"):
            model = cls(
                inputs=unpacked(inputs),
                outputs=unpacked(outputs),
                name=layer_name(config["name"]),
            )
        self.parts[id(model)] = calls.parts
        if config.get("trainable") is False:
            model.trainable = False
        return model

    def _input(self, settings: dict[str, Any]) -> Any:
        import keras

        what = f"{self.path}: the input {settings.get('name')!r}"
        if settings.get("ragged"):
            raise OldFileError(
                f"{what} is ragged, which Keras 3 does not support. Create the model with padded "
                "inputs, and restore a checkpoint of it with restore_checkpoint."
            )
        with made_by_keras(what):
            shape = settings.get("batch_input_shape") or settings["batch_shape"]
            return keras.Input(
                batch_shape=tuple(shape),
                dtype=settings.get("dtype"),
                sparse=True if settings.get("sparse") else None,
                name=layer_name(settings["name"]),
            )

    def _own_class(self, described: dict[str, Any]) -> Any:
        import keras

        written = described["class_name"]
        for name in (described.get("registered_name"), written, written.rpartition(">")[2]):
            if name and name in self.custom_objects:
                return self.custom_objects[name]
            # The caller's registered classes have a package name; Keras' own have bare names.
            if name and ">" in name:
                found = keras.saving.get_registered_object(name)
                if found is not None:
                    return found
        return None


def _name_of(function: Any) -> Any:
    if isinstance(function, dict):
        function = function.get("config")
    return function if isinstance(function, str) else None


def _own_dtype(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    _, changed = successor(kind, {"dtype": settings.get("dtype")})
    return changed if changed.get("dtype") else {}

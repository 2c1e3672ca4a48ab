"""Builds the Keras 3 model that a Keras 2 configuration describes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras

from lossscale.errors import LossScaleError, OldFileError
from lossscale_migration.damaged_files import reporting_errors
from lossscale_migration.layers import (
    ConvertedLayer,
    dtype_of_policy,
    function_name,
    is_container,
    known_settings,
    layer_in_keras_3,
    layer_name,
    name_of,
    only_element,
)
from lossscale_migration.tensor_ops import OP_LAYERS, tensor_op

_MODELS = {"Functional": keras.Model, "Model": keras.Model, "Sequential": keras.Sequential}

_WITH_VOCABULARY = ("IntegerLookup", "StringLookup", "TextVectorization")

# Settings that are layers themselves.
_INNER_LAYERS = ("layer", "backward_layer", "cell", "cells")

_CONSTANT = "_CONSTANT_VALUE"


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
        model = self._container(described)
        if model is not None:
            return model
        kind = described["class_name"].rpartition(">")[2]
        raise OldFileError(
            f"{self.path}: cannot rebuild the model {name_of(described)!r}: its class {kind!r} is "
            f"not in the file. If the model is functional, pass custom_objects={{{kind!r}: "
            "keras.Model}. Otherwise write it for Keras 3 and restore a checkpoint with "
            "restore_checkpoint."
        )

    def layer(self, described: dict[str, Any]) -> Any:
        """Returns the layer or model that a configuration describes."""
        kind, settings = described["class_name"].rpartition(">")[2], described["config"]
        what = f"{self.path}: the layer {name_of(described)!r} ({kind})"
        given = self.custom_objects.get(name_of(described))
        if isinstance(given, keras.layers.Layer):
            return given
        model = self._container(described)
        if model is not None:
            return model
        own = self._own_class(described)
        with _made_by_keras(what):
            if own is not None:
                return own.from_config({**settings, **dtype_of_policy(settings)})
            if kind == "Lambda":
                return self._lambda(settings, what)
            if kind in _WITH_VOCABULARY and settings.get("vocabulary", "") is None:
                raise OldFileError(
                    f"{what} keeps its vocabulary in a separate file. Create the layer in Keras 3 "
                    f"with its vocabulary, and pass it as custom_objects={{{name_of(described)!r}: "
                    "layer}."
                )
            other, settings = layer_in_keras_3(kind, settings)
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
        known = keras.saving.get_custom_objects() | dict(self.custom_objects)
        names = [settings.get("name"), function_name(settings.get("function"))]
        names = [name for name in names if isinstance(name, str)]
        found = next((known[name] for name in names if name in known), None)
        if found is None:
            raise OldFileError(
                f"{what} holds a Python function, which cannot be read from the file safely. Pass "
                f"it as custom_objects={{{names[-1]!r}: function}}."
            )
        shape = settings.get("output_shape")
        return keras.layers.Lambda(
            found,
            output_shape=tuple(shape) if isinstance(shape, list) else None,
            arguments=settings.get("arguments") or None,
            name=layer_name(settings["name"]),
        )

    # --- Models -------------------------------------------------------------------------------

    def _container(self, described: dict[str, Any]) -> Any:
        """Returns the model that a configuration describes; None if it is not a known model."""
        config = described["config"]
        cls = self._own_class(described) or _MODELS.get(described["class_name"].rpartition(">")[2])
        if cls is None or not is_container(described):
            return None
        if "input_layers" in config:
            model = self._functional(cls, config)
        else:
            model = self._sequential(cls, described)
        if isinstance(config, dict) and config.get("trainable") is False:
            model.trainable = False
        return model

    def _sequential(self, cls: Any, described: dict[str, Any]) -> Any:
        config = described["config"]
        # The first releases wrote only the list, without a dictionary around it.
        layers = config if isinstance(config, list) else config["layers"]
        named = {} if isinstance(config, list) else {"name": layer_name(config["name"])}
        model, parts = cls(**named), []
        for number, one in enumerate(layers):
            kind, name = one["class_name"], name_of(one)
            shape = one["config"].get("batch_input_shape") if number == 0 else None
            if shape is not None and kind != "InputLayer" and not is_container(one):
                model.add(keras.Input(batch_shape=tuple(shape), name=layer_name(f"{name}_input")))
            if kind == "InputLayer":
                tensor = self.input(one["config"])
                model.add(tensor)
                layer = tensor._keras_history[0]
            else:
                layer = self.layer(one)
                with _made_by_keras(f"{self.path}: the layer {name!r}"):
                    model.add(layer)
            parts.append(ConvertedLayer(name, kind, layer))
        self.parts[id(model)] = parts
        shape = (described.get("build_config") or {}).get("input_shape")
        if isinstance(config, dict):
            shape = config.get("build_input_shape") or shape
        if not model.built and shape:
            with _made_by_keras(f"{self.path}: the model {model.name!r}"):
                model.build(tuple(shape))
        return model

    def _functional(self, cls: Any, config: dict[str, Any]) -> Any:
        calls = FunctionalCalls(config, self)
        calls.run()
        inputs = calls.filled(config["input_layers"])
        outputs = calls.filled(config["output_layers"])
        with _made_by_keras(f"{self.path}: the model {config.get('name')!r}"):
            model = cls(
                inputs=only_element(inputs),
                outputs=only_element(outputs),
                name=layer_name(config["name"]),
            )
        self.parts[id(model)] = calls.parts
        return model

    def input(self, settings: dict[str, Any]) -> Any:
        """Returns the tensor that the settings of an input describe."""
        what = f"{self.path}: the input {settings.get('name')!r}"
        if settings.get("ragged"):
            raise OldFileError(
                f"{what} is ragged, which Keras 3 does not support. Create the model with padded "
                "inputs, and restore a checkpoint of it with restore_checkpoint."
            )
        with _made_by_keras(what):
            shape = settings.get("batch_input_shape") or settings["batch_shape"]
            return keras.Input(
                batch_shape=tuple(shape),
                dtype=settings.get("dtype"),
                sparse=True if settings.get("sparse") else None,
                name=layer_name(settings["name"]),
            )

    def _own_class(self, described: dict[str, Any]) -> Any:
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


def _made_by_keras(what: str) -> contextlib.AbstractContextManager[None]:
    """Converts exceptions of Keras 3 while it builds something to an error that names it."""
    return reporting_errors(f"Keras 3 cannot create {what}", LossScaleError)


# --- Functional models ----------------------------------------------------------------------------


class FunctionalCalls:
    """The layer calls of a functional model, made as soon as their inputs exist.

    Args:
        config: The configuration of the model.
        builder: Builds its layers.
    """

    def __init__(self, config: dict[str, Any], builder: ModelBuilder) -> None:
        self.builder = builder
        self.path = builder.path
        self.described = {name_of(one): one for one in config["layers"]}
        self.parts: list[ConvertedLayer] = []
        self.made: dict[str, Any] = {}
        self.results: dict[str, list[list[Any]]] = {}
        self.calls = {name: list(one["inbound_nodes"]) for name, one in self.described.items()}
        highest = _highest_calls(config)
        # For a model with its own inputs, the call that created it counts as the first.
        self.skipped = {
            name: int(is_container(one) and highest.get(name, 0) >= len(self.calls[name]))
            for name, one in self.described.items()
        }

    def run(self) -> None:
        """Builds the layers and calls them.

        Raises:
            OldFileError: If calls need each other's results.
        """
        for name, one in self.described.items():
            kind = one["class_name"].rpartition(">")[2]
            self.results[name] = []
            layer = None
            if kind == "InputLayer":
                tensor = self.builder.input(one["config"])
                layer = tensor._keras_history[0]
                self.results[name].append([tensor])
                self.calls[name] = []
            elif kind not in OP_LAYERS:
                layer = self.made[name] = self.builder.layer(one)
            self.parts.append(ConvertedLayer(name, kind, layer))
        waiting = [name for name, calls in self.calls.items() if calls]
        while waiting:
            if not any(self._advance(name) for name in waiting):
                raise OldFileError(
                    f"{self.path}: damaged: the layers {waiting} need each other's outputs."
                )
            waiting = [name for name in waiting if self.calls[name]]

    def _advance(self, name: str) -> bool:
        """Makes the calls of a layer whose inputs exist; returns whether there were any."""
        calls = self.calls[name]
        before = len(calls)
        while calls:
            kwargs: dict[str, Any] = {}
            try:
                inputs = self.filled(calls[0], kwargs)
                kwargs = {key: self.filled(value) for key, value in kwargs.items()}
            except _NotYetError:
                break
            described = self.described[name]
            kind = described["class_name"]
            what = f"{self.path}: the layer {name!r} ({kind})"
            with _made_by_keras(what):
                if kind in OP_LAYERS:
                    result = tensor_op(described, inputs, kwargs, what)
                else:
                    result = _called(self.made[name], described, inputs, kwargs, what)
            self.results[name].append(keras.tree.flatten(result))
            calls.pop(0)
        return len(calls) < before

    def filled(self, value: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Returns a structure with tensors for references; collects the other arguments."""
        if self._is_reference(value):
            if len(value) == 4 and kwargs is not None:
                kwargs.update(value[3])
            if value[0] == _CONSTANT:
                return value[2]
            name = value[0]
            turn = value[1] - self.skipped[name]
            if self.described[name]["class_name"] == "InputLayer":
                turn = 0
            if turn >= len(self.results[name]):
                raise _NotYetError
            return self.results[name][turn][value[2]]
        if isinstance(value, dict):
            return {key: self.filled(one, kwargs) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.filled(one, kwargs) for one in value]
        return value

    def _is_reference(self, value: Any) -> bool:
        if not isinstance(value, (list, tuple)) or len(value) not in (3, 4):
            return False
        name, call = value[:2]
        known = isinstance(name, str) and (name in self.results or name == _CONSTANT)
        return known and type(call) is int


class _NotYetError(Exception):
    """A call needs the result of a call that was not made yet."""


def _called(
    layer: Any, described: dict[str, Any], inputs: Any, kwargs: dict[str, Any], what: str
) -> Any:
    for name in ("training", "mask"):
        if name in kwargs and kwargs[name] is None:
            del kwargs[name]
    if described["config"].get("causal"):
        # In Keras 3 these are call arguments.
        kwargs["use_causal_mask"] = True
    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    inputs = only_element(inputs)
    if recurrent and isinstance(inputs, list):
        # Keras 2 passed initial states after the sequences.
        if described["config"].get("num_constants"):
            raise OldFileError(
                f"{what} was called with constants, which Keras 3 does not support. Pass them to "
                "its cell."
            )
        inputs, kwargs["initial_state"] = inputs[0], inputs[1:]
    return layer(inputs, **kwargs)


def _highest_calls(config: dict[str, Any]) -> dict[str, int]:
    """Returns, for each layer, the highest number of a call that is referenced."""
    highest: dict[str, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if not isinstance(value, (list, tuple)):
            return
        if len(value) in (3, 4) and isinstance(value[0], str) and type(value[1]) is int:
            highest[value[0]] = max(highest.get(value[0], 0), value[1])
        for one in value:
            look(one)

    look(config["output_layers"])
    for one in config["layers"]:
        look(one.get("inbound_nodes"))
    return highest

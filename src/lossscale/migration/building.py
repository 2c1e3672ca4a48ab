"""Making the model of Keras 3 that a configuration of Keras 2 describes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from lossscale.errors import LossScaleError, OldFileError
from lossscale.migration.layers import known_settings, layer_name, successor
from lossscale.migration.tensor_ops import OP_LAYERS, tensor_op

_CONSTANT = "_CONSTANT_VALUE"
_FUNCTIONAL = ("Functional", "Model")

_WITH_VOCABULARY = ("IntegerLookup", "StringLookup", "TextVectorization")

# Settings that are layers themselves.
_INNER_LAYERS = ("layer", "backward_layer", "cell", "cells")


@dataclasses.dataclass
class ConvertedLayer:
    """A layer of the file and what it became.

    Args:
        name: Its name in the file.
        kind: The name of its class in the file.
        layer: The layer of Keras 3; None for what has no weights and became an operation.
    """

    name: str
    kind: str
    layer: Any


class ModelBuilder:
    """Makes layers and models of Keras 3 out of configurations of Keras 2.

    Args:
        path: The file that is read, for messages.
        custom_objects: The caller's own classes and functions, by name.
    """

    def __init__(self, path: str, custom_objects: Mapping[str, Any]) -> None:
        self.path = path
        self.custom_objects = custom_objects
        # What models, by their identity, are made of; in the order of the file.
        self.parts: dict[int, list[ConvertedLayer]] = {}

    def model(self, described: dict[str, Any]) -> Any:
        """Returns the model that the outermost configuration of a file describes.

        Raises:
            OldFileError: If Keras 3 cannot make it. The message names the layer.
        """
        kind = described["class_name"].rpartition(">")[2]
        if _is_container(described) and self._container_class(described, kind) is not None:
            return self._container(described, kind)
        raise OldFileError(
            f"{self.path}: the model {self._name(described)!r} ({kind}) is of a class of its own. "
            "A file says what such a model does only if it is functional: then pass "
            f"custom_objects={{{kind!r}: keras.Model}} or a class like that one. If not, write it "
            "for Keras 3 and restore a checkpoint of it with restore_checkpoint."
        )

    def layer(self, described: dict[str, Any]) -> Any:
        """Returns the layer or model that a configuration describes."""
        written, settings = described["class_name"], described["config"]
        kind = written.rpartition(">")[2]
        what = f"{self.path}: the layer {self._name(described)!r} ({kind})"
        import keras

        given = self.custom_objects.get(self._name(described))
        if isinstance(given, keras.layers.Layer):
            return given
        own = self._own_class(described)
        if _is_container(described) and self._container_class(described, kind) is not None:
            return self._container(described, kind)
        with self._named(what):
            if kind == "Lambda" and own is None:
                return self._lambda(settings, what)
            if own is not None:
                return own.from_config({**settings, **_own_dtype(kind, settings)})
            if kind in _WITH_VOCABULARY and settings.get("vocabulary", "") is None:
                raise OldFileError(
                    f"{what} has its vocabulary outside of its configuration, where it cannot be "
                    "read here. Make the layer with Keras 3 and its vocabulary, and pass it as "
                    f"custom_objects={{{self._name(described)!r}: layer}}."
                )
            other, settings = successor(kind, settings)
            cls: Any = getattr(keras.layers, other, None)
            if not callable(cls):
                raise OldFileError(
                    f"{what} has no successor in Keras 3. Write a layer of Keras 3 that does the "
                    f"same, with its weights in the same order, and pass it as "
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
                f"{what} holds a function of Python, which cannot be read out of the file safely. "
                f"Pass it as custom_objects={{{(names[1] or names[0])!r}: function}}."
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
        # The first releases wrote the list alone.
        layers = config if isinstance(config, list) else config["layers"]
        named = {} if isinstance(config, list) else {"name": layer_name(config["name"])}
        model, parts = cls(**named), []
        for number, one in enumerate(layers):
            shape = one["config"].get("batch_input_shape") if number == 0 else None
            if shape is not None and one["class_name"] != "InputLayer" and not _is_container(one):
                first = f"{self._name(one)}_input"
                model.add(keras.Input(batch_shape=tuple(shape), name=layer_name(first)))
            if one["class_name"] == "InputLayer":
                tensor = self._input(one["config"])
                model.add(tensor)
                parts.append(
                    ConvertedLayer(self._name(one), "InputLayer", tensor._keras_history[0])
                )
                continue
            layer = self.layer(one)
            with self._named(f"{self.path}: the layer {self._name(one)!r}"):
                model.add(layer)
            parts.append(ConvertedLayer(self._name(one), one["class_name"], layer))
        self.parts[id(model)] = parts
        shape = (described.get("build_config") or {}).get("input_shape")
        if isinstance(config, dict):
            shape = config.get("build_input_shape") or shape
        if not model.built and shape:
            with self._named(f"{self.path}: the model {model.name!r}"):
                model.build(tuple(shape))
        if isinstance(config, dict) and config.get("trainable") is False:
            model.trainable = False
        return model

    def _functional(self, cls: Any, config: dict[str, Any]) -> Any:
        graph = _Graph(self, config)
        graph.run()
        inputs = graph.tensors(config["input_layers"])
        outputs = graph.tensors(config["output_layers"])
        with self._named(f"{self.path}: the model {config.get('name')!r}"):
            model = cls(
                inputs=_unpacked(inputs),
                outputs=_unpacked(outputs),
                name=layer_name(config["name"]),
            )
        self.parts[id(model)] = graph.parts
        if config.get("trainable") is False:
            model.trainable = False
        return model

    def _input(self, settings: dict[str, Any]) -> Any:
        import keras

        what = f"{self.path}: the input {settings.get('name')!r}"
        if settings.get("ragged"):
            raise OldFileError(
                f"{what} is ragged, which Keras 3 has not. Make the model with padded inputs, and "
                "restore a checkpoint of it with restore_checkpoint."
            )
        with self._named(what):
            shape = settings.get("batch_input_shape") or settings["batch_shape"]
            return keras.Input(
                batch_shape=tuple(shape),
                dtype=settings.get("dtype"),
                sparse=True if settings.get("sparse") else None,
                name=layer_name(settings["name"]),
            )

    # --- Names and errors ---------------------------------------------------------------------

    def _name(self, described: dict[str, Any]) -> str:
        config = described["config"]
        name = described.get("name") or (isinstance(config, dict) and config.get("name"))
        return str(name or described["class_name"])

    def _own_class(self, described: dict[str, Any]) -> Any:
        import keras

        written = described["class_name"]
        for name in (described.get("registered_name"), written, written.rpartition(">")[2]):
            if name and name in self.custom_objects:
                return self.custom_objects[name]
            # A registered class of the caller's; Keras' own go by their bare names.
            if name and ">" in name:
                found = keras.saving.get_registered_object(name)
                if found is not None:
                    return found
        return None

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except LossScaleError:
            raise
        # Keras raises whatever the layer of the moment raises.
        except Exception as error:
            text = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise OldFileError(f"{what} cannot be made by Keras 3: {text}") from error


class _Graph:
    """The calls of a functional model, which are made in an order in which they can be."""

    def __init__(self, builder: ModelBuilder, config: dict[str, Any]) -> None:
        self.builder = builder
        layers = config["layers"]
        self.described = {builder._name(one): one for one in layers}
        self.parts: list[ConvertedLayer] = []
        self.made: dict[str, Any] = {}
        self.results: dict[str, list[list[Any]]] = {}
        self.calls = {name: list(one["inbound_nodes"]) for name, one in self.described.items()}
        highest = _highest_calls(config)
        # A model that has its own inputs counts the call that made it as its first one.
        self.skipped = {
            name: int(_is_container(one) and highest.get(name, 0) >= len(self.calls[name]))
            for name, one in self.described.items()
        }

    def run(self) -> None:
        """Makes the layers and calls them.

        Raises:
            OldFileError: If calls need each other's results.
        """
        for name, one in self.described.items():
            kind = one["class_name"].rpartition(">")[2]
            self.results[name] = []
            if kind == "InputLayer":
                tensor = self.builder._input(one["config"])
                self.results[name].append([tensor])
                self.parts.append(ConvertedLayer(name, kind, tensor._keras_history[0]))
                self.calls[name] = []
            elif kind in OP_LAYERS:
                self.parts.append(ConvertedLayer(name, kind, None))
            else:
                self.made[name] = self.builder.layer(one)
                self.parts.append(ConvertedLayer(name, kind, self.made[name]))
        waiting = [name for name, calls in self.calls.items() if calls]
        while waiting:
            if not any(self._advance(name) for name in waiting):
                raise OldFileError(
                    f"{self.builder.path}: damaged: the layers {waiting} need each other's outputs."
                )
            waiting = [name for name in waiting if self.calls[name]]

    def _advance(self, name: str) -> bool:
        """Makes the calls of a layer that can be made; returns whether there were any."""
        import keras

        calls = self.calls[name]
        before = len(calls)
        while calls:
            kwargs: dict[str, Any] = {}
            try:
                inputs = self._filled(calls[0], kwargs)
                kwargs = {key: self._filled(value, None) for key, value in kwargs.items()}
            except _NotYetError:
                break
            described = self.described[name]
            kind = described["class_name"]
            what = f"{self.builder.path}: the layer {name!r} ({kind})"
            with self.builder._named(what):
                if kind in OP_LAYERS:
                    result = tensor_op(described, inputs, kwargs, what)
                else:
                    result = _called(self.made[name], described, inputs, kwargs, what)
            self.results[name].append(keras.tree.flatten(result))
            calls.pop(0)
        return len(calls) < before

    def tensors(self, references: Any) -> Any:
        """Returns what references to tensors stand for, in the same structure."""
        return self._filled(references, None)

    def _filled(self, value: Any, kwargs: dict[str, Any] | None) -> Any:
        """Returns a structure with tensors for references; collects the other arguments."""
        if self._is_reference(value):
            if len(value) == 4 and kwargs is not None:
                kwargs.update(value[3])
            if value[0] == _CONSTANT:
                return value[2]
            turn = value[1] - self.skipped.get(value[0], 0)
            if (
                value[0] in self.described
                and self.described[value[0]]["class_name"] == "InputLayer"
            ):
                turn = 0
            if turn >= len(self.results[value[0]]):
                raise _NotYetError
            return self.results[value[0]][turn][value[2]]
        if isinstance(value, dict):
            return {key: self._filled(one, kwargs) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._filled(one, kwargs) for one in value]
        return value

    def _is_reference(self, value: Any) -> bool:
        if not isinstance(value, (list, tuple)) or len(value) not in (3, 4):
            return False
        name, call = value[:2]
        known = isinstance(name, str) and (name in self.results or name == _CONSTANT)
        return known and type(call) is int


class _NotYetError(Exception):
    """A call needs the result of one that was not made yet."""


def _called(
    layer: Any, described: dict[str, Any], inputs: Any, kwargs: dict[str, Any], what: str
) -> Any:
    import keras

    for name in ("training", "mask"):
        if name in kwargs and kwargs[name] is None:
            del kwargs[name]
    if described["config"].get("causal"):
        # What is an argument of the call in Keras 3.
        kwargs["use_causal_mask"] = True
    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    inputs = _unpacked(inputs)
    if recurrent and isinstance(inputs, list):
        # Keras 2 put the initial states behind the sequences.
        if described["config"].get("num_constants"):
            raise OldFileError(
                f"{what} was called with constants, which Keras 3 has not. Give them to its cell."
            )
        inputs, kwargs["initial_state"] = inputs[0], inputs[1:]
    return layer(inputs, **kwargs)


def _highest_calls(config: dict[str, Any]) -> dict[str, int]:
    """Returns the highest number of a call of each layer that something refers to."""
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


def _is_container(described: dict[str, Any]) -> bool:
    config = described["config"]
    if isinstance(config, list):
        return bool(described["class_name"] == "Sequential")
    return "layers" in config and isinstance(config["layers"], list)


def _unpacked(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _name_of(function: Any) -> Any:
    if isinstance(function, dict):
        function = function.get("config")
    return function if isinstance(function, str) else None


def _own_dtype(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    _, changed = successor(kind, {"dtype": settings.get("dtype")})
    return changed if changed.get("dtype") else {}

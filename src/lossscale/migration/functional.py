"""Calls the layers of a functional Keras 2 model in an order that works in Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale.errors import OldFileError
from lossscale.migration.layers import (
    ConvertedLayer,
    is_container,
    made_by_keras,
    name_of,
    unpacked,
)
from lossscale.migration.tensor_ops import OP_LAYERS, tensor_op

_CONSTANT = "_CONSTANT_VALUE"


class FunctionalCalls:
    """The layer calls of a functional model, made as soon as their inputs exist.

    Args:
        config: The configuration of the model.
        path: The file, for messages.
        make_layer: Builds the layer that a configuration describes.
        make_input: Creates the tensor that the settings of an input describe.
    """

    def __init__(
        self,
        config: dict[str, Any],
        path: str,
        make_layer: Callable[[dict[str, Any]], Any],
        make_input: Callable[[dict[str, Any]], Any],
    ) -> None:
        self.path, self.make_layer, self.make_input = path, make_layer, make_input
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
            if kind == "InputLayer":
                tensor = self.make_input(one["config"])
                self.results[name].append([tensor])
                self.parts.append(ConvertedLayer(name, kind, tensor._keras_history[0]))
                self.calls[name] = []
            elif kind in OP_LAYERS:
                self.parts.append(ConvertedLayer(name, kind, None))
            else:
                self.made[name] = self.make_layer(one)
                self.parts.append(ConvertedLayer(name, kind, self.made[name]))
        waiting = [name for name, calls in self.calls.items() if calls]
        while waiting:
            if not any(self._advance(name) for name in waiting):
                raise OldFileError(
                    f"{self.path}: damaged: the layers {waiting} need each other's outputs."
                )
            waiting = [name for name in waiting if self.calls[name]]

    def _advance(self, name: str) -> bool:
        """Makes the calls of a layer whose inputs exist; returns whether there were any."""
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
            what = f"{self.path}: the layer {name!r} ({kind})"
            with made_by_keras(what):
                if kind in OP_LAYERS:
                    result = tensor_op(described, inputs, kwargs, what)
                else:
                    result = _called(self.made[name], described, inputs, kwargs, what)
            self.results[name].append(keras.tree.flatten(result))
            calls.pop(0)
        return len(calls) < before

    def tensors(self, references: Any) -> Any:
        """Returns the tensors that references point to, in the same structure."""
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
    """A call needs the result of a call that was not made yet."""


def _called(
    layer: Any, described: dict[str, Any], inputs: Any, kwargs: dict[str, Any], what: str
) -> Any:
    import keras

    for name in ("training", "mask"):
        if name in kwargs and kwargs[name] is None:
            del kwargs[name]
    if described["config"].get("causal"):
        # In Keras 3 these are call arguments.
        kwargs["use_causal_mask"] = True
    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    inputs = unpacked(inputs)
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

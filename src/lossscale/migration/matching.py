"""Which object of a program is which object of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lossscale.errors import OldFileError
from lossscale.migration.graph import Graph, Node
from lossscale.migration.parts import is_layer, numbered_layers, part
from lossscale.optimizer import LossScaleOptimizer


class Matches:
    """The pairs that were found by following the same names on both sides.

    Args:
        graph: The checkpoint.
        objects: The objects of the program, by the names they were saved under.

    Raises:
        OldFileError: If the file has no object of such a name, or lacks a variable.
    """

    def __init__(self, graph: Graph, objects: Mapping[str, Any]) -> None:
        self.graph = graph
        self.variables: dict[int, Any] = {}
        self.optimizers: list[tuple[str, Node, Any]] = []
        # Layers that compute something from their variables, once those are set.
        self.finalized: list[Any] = []
        self._seen: set[tuple[int, int]] = set()
        self._paths: dict[int, str] = {}
        root = graph.nodes[0]
        for name, thing in objects.items():
            number = 0 if name == "root" and name not in root.children else root.children.get(name)
            if number is None:
                known = sorted(set(root.children) - {"save_counter"})
                raise OldFileError(
                    f"{graph.path}: holds no object named {name!r}; it holds {known}. Name the "
                    "objects as they were saved; a model whose `save_weights` wrote the file is "
                    "`root`."
                )
            self._follow(number, thing, name)
        for name, thing in objects.items():
            self._check_complete(name, thing)

    def _follow(self, number: int, thing: Any, path: str) -> None:
        if thing is None or (number, id(thing)) in self._seen:
            return
        self._seen.add((number, id(thing)))
        node = self.graph.nodes[number]
        if is_variable(thing):
            if node.value is not None:
                self._check_shape(node, thing, path)
                self.variables[number] = thing
                self._paths[id(thing)] = path
            return
        if is_any_optimizer(thing):
            if isinstance(thing, LossScaleOptimizer):
                self.optimizers.append((path, node, thing))
            return
        layers = numbered_layers(self.graph, node, thing)
        for name, child in node.children.items():
            below = layers[name] if name in layers else part(thing, name)
            self._follow(child, below, f"{path}/{name}")
        if is_layer(thing) and not hasattr(thing, "layers"):
            self._check_placed(node, thing, path)
        if callable(getattr(thing, "finalize_state", None)) and thing.weights:
            self.finalized.append(thing)

    def _check_shape(self, node: Node, variable: Any, path: str) -> None:
        if tuple(variable.shape) != tuple(node.value.shape):
            raise OldFileError(
                f"{self.graph.path}: {path} has the shape {tuple(node.value.shape)} in the file "
                f"and {tuple(variable.shape)} here. Nothing was changed."
            )

    def _check_placed(self, node: Node, layer: Any, path: str) -> None:
        for name, child in node.children.items():
            if self.graph.nodes[child].value is not None and child not in self.variables:
                raise OldFileError(
                    f"{self.graph.path}: {path}/{name}, {self.graph.nodes[child].name!r}, has no "
                    f"place in the layer {layer.name!r}. Make the layer as the saved one was made. "
                    "Nothing was changed."
                )

    def _check_complete(self, name: str, thing: Any) -> None:
        for variable in variables_of(thing):
            if id(variable) not in self._paths:
                raise OldFileError(
                    f"{self.graph.path}: holds no value for the variable {variable.name!r} of "
                    f"{name!r}. Nothing was changed."
                )


def is_variable(thing: Any) -> bool:
    """Whether a thing is a variable of TensorFlow or Keras."""
    return callable(getattr(thing, "assign", None)) and hasattr(thing, "shape")


def is_any_optimizer(thing: Any) -> bool:
    """Whether a thing is an optimizer of any framework."""
    return isinstance(thing, LossScaleOptimizer) or hasattr(thing, "apply_gradients")


def variables_of(thing: Any) -> Iterator[Any]:
    """Yields the variables of an object that a checkpoint of it holds."""
    if is_variable(thing):
        yield thing
    elif is_any_optimizer(thing):
        return
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from variables_of(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from variables_of(value)
    elif hasattr(thing, "weights"):
        yield from thing.weights
    elif not callable(getattr(thing, "variables", None)):
        yield from getattr(thing, "variables", None) or []


def trainable_of(thing: Any) -> Iterator[Any]:
    """Yields the variables of an object that an optimizer may train, in the model's order."""
    if hasattr(thing, "trainable_variables") and not is_any_optimizer(thing):
        yield from thing.trainable_variables
    else:
        for variable in variables_of(thing):
            dtype = getattr(variable.dtype, "name", str(variable.dtype))
            if getattr(variable, "trainable", False) and "float" in dtype:
                yield variable

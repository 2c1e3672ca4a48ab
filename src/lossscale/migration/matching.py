"""Which object of a program is which object of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lossscale.errors import OldFileError
from lossscale.migration.graph import Graph, Node
from lossscale.optimizer import LossScaleOptimizer

# How a functional or sequential model of Keras 2 names the layers that have weights. It names all
# of them `layer-0` and so on a second time.
_NUMBERED = "layer_with_weights-"

# What an attribute of Keras 2 is called in Keras 3.
_RENAMED = {"depthwise_kernel": "kernel"}


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
        layers = self._layers(node, thing)
        for name, child in node.children.items():
            below = layers[name] if name in layers else part(thing, name)
            self._follow(child, below, f"{path}/{name}")

    def _layers(self, node: Node, model: Any) -> dict[str, Any]:
        """Returns the layers that a model of Keras 2 numbers, by what it calls them.

        By their names if this model has the same ones, else by their order.
        """
        numbered = [name for name in node.children if name.startswith(_NUMBERED)]
        if not numbered:
            return {}
        layers = [layer for layer in getattr(model, "layers", None) or [] if layer.weights]
        if len(layers) != len(numbered):
            raise OldFileError(
                f"{self.graph.path}: the model in the file has {len(numbered)} layers with "
                f"weights, this one has {len(layers)}. A model without weights has to be built "
                "first. Nothing was changed."
            )
        by_name = {layer.name: layer for layer in layers}
        names = {name: self._layer_name(node.children[name]) for name in numbered}
        if set(names.values()) == set(by_name):
            return {name: by_name[layer] for name, layer in names.items()}
        return {name: layers[int(name.removeprefix(_NUMBERED))] for name in numbered}

    def _layer_name(self, number: int) -> str:
        """Returns what the first variable below a node is named after."""
        seen, waiting = {number}, [number]
        while waiting:
            node = self.graph.nodes[waiting.pop(0)]
            if node.value is not None:
                return node.name.partition("/")[0]
            waiting += [child for child in node.children.values() if child not in seen]
            seen |= set(node.children.values())
        return ""

    def _check_shape(self, node: Node, variable: Any, path: str) -> None:
        if tuple(variable.shape) != tuple(node.value.shape):
            raise OldFileError(
                f"{self.graph.path}: {path} has the shape {tuple(node.value.shape)} in the file "
                f"and {tuple(variable.shape)} here. Nothing was changed."
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


def part(thing: Any, name: str) -> Any:
    """Returns what a thing calls `name`, or None."""
    if isinstance(thing, Mapping):
        return thing.get(name)
    if isinstance(thing, (list, tuple)):
        return thing[int(name)] if name.isdecimal() and int(name) < len(thing) else None
    # Some names are properties that raise whatever they like before they have a value.
    try:
        return getattr(thing, name, None if name not in _RENAMED else part(thing, _RENAMED[name]))
    except Exception:
        return None


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

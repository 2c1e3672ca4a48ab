"""Matches the objects of a program to the objects in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lossscale.errors import OldFileError
from lossscale.optimizer import LossScaleOptimizer
from lossscale_migration.graph import Graph, Node

# The names of the layers with weights in a functional or sequential Keras 2 model. A second set of
# names, `layer-0` and so on, covers all layers.
_NUMBERED = "layer_with_weights-"


class MatchedObjects:
    """The pairs found by following the same names on both sides.

    Args:
        graph: The checkpoint.
        objects: The objects of the program, by the names under which they were saved.

    Raises:
        OldFileError: If the file has no object with such a name, or lacks a variable.
    """

    def __init__(self, graph: Graph, objects: Mapping[str, Any]) -> None:
        self.graph = graph
        self.variables: dict[int, Any] = {}
        self.optimizers: list[tuple[str, Node, Any]] = []
        # Layers that derive values from their variables after these are set.
        self.finalized: list[Any] = []
        self._seen: set[tuple[int, int]] = set()
        self._paths: dict[int, str] = {}
        root = graph.nodes[0]
        for name, thing in objects.items():
            number = 0 if name == "root" and name not in root.children else root.children.get(name)
            if number is None:
                known = sorted(set(root.children) - {"save_counter"})
                raise OldFileError(
                    f"{graph.path}: contains no object named {name!r}; it contains {known}. Pass "
                    "objects by the names they were saved under; a model whose `save_weights` "
                    "wrote the file is `root`."
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
                self._check_one_to_one(number, thing, path)
                self.variables[number] = thing
                self._paths[id(thing)] = path
            return
        if is_any_optimizer(thing):
            if isinstance(thing, LossScaleOptimizer):
                self.optimizers.append((path, node, thing))
            return
        layers = numbered_layers(self.graph, node, thing)
        for name, child in node.children.items():
            below = layers[name] if name in layers else attribute(thing, name)
            self._follow(child, below, f"{path}/{name}")
        if is_layer(thing) and not hasattr(thing, "layers"):
            self._check_placed(node, thing, path)
        if callable(getattr(thing, "finalize_state", None)) and thing.weights:
            self.finalized.append(thing)

    def _check_shape(self, node: Node, variable: Any, path: str) -> None:
        if tuple(variable.shape) != tuple(node.value.shape):
            raise OldFileError(
                f"{self.graph.path}: {path} has shape {tuple(node.value.shape)} in the file and "
                f"{tuple(variable.shape)} here. Nothing was changed."
            )

    def _check_one_to_one(self, number: int, variable: Any, path: str) -> None:
        """Checks that two names share a variable here if they do in the file."""
        before = self.variables.get(number)
        if before is not None:
            one, two = "the file", "this program"
        elif id(variable) in self._paths:
            before, one, two = variable, "this program", "the file"
        else:
            return
        raise OldFileError(
            f"{self.graph.path}: {self._paths[id(before)]} and {path} are one variable in {one} "
            f"and two in {two}. Nothing was changed. Share what the program shared that wrote the "
            "file."
        )

    def _check_placed(self, node: Node, layer: Any, path: str) -> None:
        for name, child in node.children.items():
            if self.graph.nodes[child].value is not None and child not in self.variables:
                raise OldFileError(
                    f"{self.graph.path}: {path}/{name}, {self.graph.nodes[child].name!r}, does not "
                    f"exist in the layer {layer.name!r}. Nothing was changed. Create the layer "
                    "with the arguments of the saved one."
                )

    def _check_complete(self, name: str, thing: Any) -> None:
        for variable in variables_of(thing):
            if id(variable) not in self._paths:
                raise OldFileError(
                    f"{self.graph.path}: contains no value for the variable {variable.name!r} of "
                    f"{name!r}. Nothing was changed."
                )


def is_variable(thing: Any) -> bool:
    """Whether an object is a variable of TensorFlow or Keras."""
    return callable(getattr(thing, "assign", None)) and hasattr(thing, "shape")


def is_any_optimizer(thing: Any) -> bool:
    """Whether an object is an optimizer of any framework."""
    return isinstance(thing, LossScaleOptimizer) or hasattr(thing, "apply_gradients")


def variables_of(thing: Any) -> Iterator[Any]:
    """Yields the variables of an object that a checkpoint contains."""
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


def attribute(thing: Any, name: str) -> Any:
    """Returns the attribute `name` of an object, or None.

    A SavedModel also names computed lists such as `variables`. They are ignored: their order
    depends on the release and on which layers are frozen.
    """
    if isinstance(thing, Mapping):
        return thing.get(name)
    if isinstance(thing, (list, tuple)):
        return thing[int(name)] if name.isdecimal() and int(name) < len(thing) else None
    # Some properties raise arbitrary exceptions before they have a value.
    try:
        found = getattr(thing, name, None)
        if found is None and name == "depthwise_kernel":
            # Keras 3 renamed it in its depthwise convolutions.
            found = getattr(thing, "kernel", None)
    except Exception:
        return None
    computed = isinstance(getattr(type(thing), name, None), property)
    return None if computed and isinstance(found, (list, tuple)) else found


def is_layer(thing: Any) -> bool:
    """Whether an object is a layer or a model of Keras 3 or tf_keras."""
    # In this order: a dictionary with layers as keys raises when asked for its weights.
    return hasattr(thing, "_flatten_layers") and hasattr(thing, "weights")


def numbered_layers(graph: Graph, node: Node, model: Any) -> dict[str, Any]:
    """Returns the layers that a Keras 2 model numbers, by their names in the checkpoint.

    They are matched by name if each name in the file belongs to one layer of this model, otherwise
    by order.

    Raises:
        OldFileError: If this model has another number of layers with weights, or some layers have
            the names in the file but in another order.
    """
    numbered = [name for name in node.children if name.startswith(_NUMBERED)]
    numbered.sort(key=lambda name: int(name.removeprefix(_NUMBERED)))
    if not numbered:
        return {}
    layers = [layer for layer in getattr(model, "layers", None) or [] if layer.weights]
    if len(layers) != len(numbered):
        raise OldFileError(
            f"{graph.path}: the model in the file has {len(numbered)} layers with weights, this "
            f"one has {len(layers)}. Nothing was changed. If this model has no weights yet, build "
            "it first."
        )
    said = {name: _layer_name(graph, node.children[name]) for name in numbered}
    by_name = {name: _only_layer(layers, called) for name, called in said.items()}
    if len({id(layer) for layer in by_name.values() if layer is not None}) == len(layers):
        return by_name
    by_order = dict(zip(numbered, layers, strict=True))
    for name, layer in by_order.items():
        _check_no_other(graph, said[name], layer, layers)
    return by_order


def _layer_name(graph: Graph, number: int) -> str:
    """Returns the layer name in the name of the first variable below a node."""
    names = (node.name for _, node in graph.paths(number) if node.value is not None)
    return next(names, "").partition("/")[0]


def _only_layer(layers: list[Any], name: str) -> Any:
    """Returns the layer with a name, or the layer that contains it, or None.

    Keras 2 names a variable after its layer, without the models around it.
    """
    found = [layer for layer in layers if layer.name == name]
    found = found or [layer for layer in layers if name in _names_inside(layer)]
    return found[0] if len(found) == 1 else None


def _names_inside(layer: Any) -> set[str]:
    return {inner.name for inner in layer._flatten_layers(include_self=False)}


def _check_no_other(graph: Graph, name: str, layer: Any, layers: list[Any]) -> None:
    if layer.name == name:
        return
    other = next((other for other in layers if other.name == name), None)
    # Generated names are numbered across models, so the order is more reliable.
    if other is not None and not _is_automatic(other):
        raise OldFileError(
            f"{graph.path}: the layer {name!r} is at another position than in this model, which "
            f"has {layer.name!r} there. Nothing was changed. Give every layer the name that it has "
            "in the file."
        )


def _is_automatic(layer: Any) -> bool:
    made = re.sub(r"_\d+$", "", layer.name).replace("_", "")
    return made == type(layer).__name__.lower()

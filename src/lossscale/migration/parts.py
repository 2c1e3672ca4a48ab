"""What a layer or model calls the objects that a checkpoint names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lossscale.errors import OldFileError
from lossscale.migration.graph import Graph, Node

# How a functional or sequential model of Keras 2 names the layers that have weights. It names all
# of them `layer-0` and so on a second time.
_NUMBERED = "layer_with_weights-"

# Where Keras 3 gave another name to the same weight.
_RENAMED = {
    "DepthwiseConv1D": {"depthwise_kernel": "kernel"},
    "DepthwiseConv2D": {"depthwise_kernel": "kernel"},
}


def part(thing: Any, name: str) -> Any:
    """Returns what a thing calls `name`, or None.

    A SavedModel also names lists such as `variables`, which are computed. Their order depends on
    which layers are frozen and on the release, so they say nothing about which variable is whose.
    """
    if isinstance(thing, Mapping):
        return thing.get(name)
    if isinstance(thing, (list, tuple)):
        return thing[int(name)] if name.isdecimal() and int(name) < len(thing) else None
    # Some names are properties that raise whatever they like before they have a value.
    try:
        found = getattr(thing, name, None)
        if found is None:
            found = getattr(thing, _RENAMED.get(type(thing).__name__, {}).get(name, name), None)
    except Exception:
        return None
    computed = isinstance(getattr(type(thing), name, None), property)
    return None if computed and isinstance(found, (list, tuple)) else found


def is_layer(thing: Any) -> bool:
    """Whether a thing is a layer or a model of Keras 3 or tf_keras."""
    # In this order: a dictionary with layers for keys raises when it is asked for its weights.
    return hasattr(thing, "_flatten_layers") and hasattr(thing, "weights")


def numbered_layers(graph: Graph, node: Node, model: Any) -> dict[str, Any]:
    """Returns the layers that a model of Keras 2 numbers, by what it calls them.

    By their names if each name in the file means one layer of this model, else by their order.

    Raises:
        OldFileError: If this model has another number of layers with weights, or layers of the
            same names in another order among layers of other names.
    """
    numbered = sorted((name for name in node.children if name.startswith(_NUMBERED)), key=_turn)
    if not numbered:
        return {}
    layers = [layer for layer in getattr(model, "layers", None) or [] if layer.weights]
    if len(layers) != len(numbered):
        raise OldFileError(
            f"{graph.path}: the model in the file has {len(numbered)} layers with "
            f"weights, this one has {len(layers)}. A model without weights has to be built "
            "first. Nothing was changed."
        )
    said = {name: _layer_name(graph, node.children[name]) for name in numbered}
    by_name = {name: _only_layer(layers, called) for name, called in said.items()}
    if len({id(layer) for layer in by_name.values() if layer is not None}) == len(layers):
        return by_name
    by_order = dict(zip(numbered, layers, strict=True))
    for name, layer in by_order.items():
        _check_no_other(graph, said[name], layer, layers)
    return by_order


def _turn(name: str) -> int:
    return int(name.removeprefix(_NUMBERED))


def _layer_name(graph: Graph, number: int) -> str:
    """Returns what the first variable below a node is named after."""
    seen, waiting = {number}, [number]
    while waiting:
        node = graph.nodes[waiting.pop(0)]
        if node.value is not None:
            return node.name.partition("/")[0]
        waiting += [child for child in node.children.values() if child not in seen]
        seen |= set(node.children.values())
    return ""


def _only_layer(layers: list[Any], name: str) -> Any:
    """Returns the one layer of a name, or the one with a layer of that name inside, or None.

    Keras 2 names a variable after its layer, and says nothing of the models around it.
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
    # Names that Keras makes count on from model to model: there the order says more.
    if other is not None and not _is_automatic(other):
        raise OldFileError(
            f"{graph.path}: the layer {name!r} stands elsewhere in the file than in this model, "
            f"which has {layer.name!r} in its place, and not all layers have the names that they "
            "have in the file. Give the layers the names of then. Nothing was changed."
        )


def _is_automatic(layer: Any) -> bool:
    made = re.sub(r"_\d+$", "", layer.name).replace("_", "")
    return made == type(layer).__name__.lower()

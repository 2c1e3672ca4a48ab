"""The state of an optimizer in a file, in one form for all releases."""

from __future__ import annotations

import dataclasses
from typing import Any

from lossscale.errors import OldFileError
from lossscale_migration.array_roles import split_label
from lossscale_migration.graph import Graph, Node

OLDEST = "TensorFlow 2.0 to 2.2"
FIRST_KIND = "TensorFlow 2.3 to 2.15 or tf_keras, optimizers.legacy"
NEW_KIND = "TensorFlow 2.8 to 2.15 or tf_keras, new optimizers"
KERAS_3 = "Keras 3"
OURS = "lossscale on Keras 3"

# Names under an optimizer that are neither settings nor slots.
_BOOKKEEPING = {
    "_index_dict",
    "_last_step_skipped",
    "_steps_skipped",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_variables",
    "base_optimizer",
    "inner_optimizer",
    "loss_scale",
}


@dataclasses.dataclass
class SavedSlot:
    """One array of an optimizer for one variable.

    Args:
        names: The names of the slot in the file, the most specific one first.
        value: The array.
        variable: The number of the variable's node in the graph; None if not in the file.
        index: The position of the variable among those that the optimizer was built with, or None.
        label: The name of the array in the file.
    """

    names: list[str]
    value: Any
    variable: int | None = None
    index: int | None = None
    label: str = ""


@dataclasses.dataclass
class SavedOptimizer:
    """The state of an optimizer.

    Args:
        era: The releases that write such a file.
        name: The optimizer's name; None if not in the file.
        wrapped: Whether it had loss scaling. In a file of the new optimizers, a fixed scale looks
            like none.
        iterations: Training steps; None if not in the file.
        skipped: Number of skipped steps, if it is in the file.
        learning_rate: None if it is not in the file, or was a schedule.
        settings: The other hyperparameters, by name.
        scale: The loss scale; None if it was fixed.
        good_steps: Finite steps since the scale last changed.
        loss_scale: The other values of the loss scale, by name.
        slots: The arrays for each variable.
        others: Everything else, by name, such as `momentum_cache`.
    """

    era: str
    name: str | None = None
    wrapped: bool = False
    iterations: int | None = None
    skipped: int = 0
    learning_rate: float | None = None
    settings: dict[str, float] = dataclasses.field(default_factory=dict)
    scale: float | None = None
    good_steps: int | None = None
    loss_scale: dict[str, Any] = dataclasses.field(default_factory=dict)
    slots: list[SavedSlot] = dataclasses.field(default_factory=list)
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


def is_optimizer(graph: Graph, node: Node) -> bool:
    """Whether a node looks like an optimizer of any release."""
    children = node.children
    return bool(
        node.slots
        or "_iterations" in children
        or "inner_optimizer" in children
        or ("iter" in children and graph.value(node, "iter") is not None)
        or ("base_optimizer" in children and "loss_scale" in children)
    )


def find_optimizers(graph: Graph) -> list[tuple[str, Node]]:
    """Returns the optimizers of a graph with their paths, without inner optimizers.

    Raises:
        OldFileError: If there is none.
    """
    found = [(path, node) for path, node in graph.paths() if is_optimizer(graph, node)]
    inside = [
        graph.child(node, name)
        for _, node in found
        for name in ("base_optimizer", "inner_optimizer")
    ]
    found = [(path, node) for path, node in found if not any(node is each for each in inside)]
    if not found:
        raise OldFileError(f"{graph.path}: this checkpoint does not contain an optimizer.")
    return found


def read_optimizer(graph: Graph, node: Node) -> SavedOptimizer:
    """Returns the optimizer state in a node of a graph."""
    inner, loss_scale = graph.child(node, "base_optimizer"), graph.child(node, "loss_scale")
    if inner.children or inner.slots:
        saved = _read_first_kind(graph, inner, OLDEST)
    elif "inner_optimizer" in node.children:
        saved = _read_keras_3(graph, node)
    elif "_iterations" in node.children:
        era = KERAS_3 if "_trainable_variables" in node.children else NEW_KIND
        saved = _read_lists(graph, node, era)
    else:
        saved = _read_first_kind(graph, node, FIRST_KIND)
    saved.wrapped |= "base_optimizer" in node.children or "loss_scale" in node.children
    found = {name: graph.value(loss_scale, name) for name in loss_scale.children}
    saved.loss_scale = {name: value for name, value in found.items() if value is not None}
    if "current_loss_scale" in saved.loss_scale:
        saved.scale = float(saved.loss_scale["current_loss_scale"])
        saved.good_steps = int(saved.loss_scale.get("good_steps", 0))
    if "steps_skipped" in loss_scale.extras:
        # Files of this library on tf_keras; the rest matches TensorFlow's.
        _count_skips(saved, loss_scale.extras["steps_skipped"])
    return saved


def _count_skips(saved: SavedOptimizer, skipped: Any) -> None:
    """Sets the skipped steps, which are not in the inner optimizer's counter."""
    saved.skipped = int(skipped)
    if saved.iterations is not None:
        saved.iterations += saved.skipped


def _read_first_kind(graph: Graph, node: Node, era: str) -> SavedOptimizer:
    saved = SavedOptimizer(era)
    for name, number in node.children.items():
        value = graph.nodes[number].value
        if name in _BOOKKEEPING or value is None:
            continue
        if name == "iter":
            saved.iterations = int(value)
            # `SGD/iter`, or `cond_1/SGD/iter` if the first step created it.
            saved.name = (["", *graph.nodes[number].name.split("/")])[-2] or None
        elif name == "learning_rate":
            saved.learning_rate = float(value)
        elif name == "momentum_cache" or value.shape or value.dtype.kind != "f":
            saved.others[name] = value
        else:
            saved.settings[name] = float(value)
    for name, variable, slot in node.slots:
        found = graph.nodes[slot]
        if found.value is not None:
            saved.slots.append(SavedSlot([name], found.value, variable, label=found.name))
    return saved


def _read_keras_3(graph: Graph, node: Node) -> SavedOptimizer:
    ours = "_steps_skipped" in node.children
    saved = _read_lists(graph, graph.child(node, "inner_optimizer"), OURS if ours else KERAS_3)
    saved.wrapped = True
    if ours:
        _count_skips(saved, graph.value(node, "_steps_skipped"))
    if graph.value(node, "dynamic_scale") is not None:
        saved.scale = float(graph.value(node, "dynamic_scale"))
        saved.good_steps = int(graph.value(node, "step_counter"))
    return saved


def _read_lists(graph: Graph, node: Node, era: str) -> SavedOptimizer:
    saved = SavedOptimizer(era)
    own = set(graph.child(node, "_variables").children.values())
    references = graph.child(node, "_trainable_variables")
    by_name: dict[str, list[int]] = {}
    for number, other in enumerate(graph.nodes):
        if other.value is not None and number not in own:
            by_name.setdefault(other.name, []).append(number)
    for name, number in node.children.items():
        child = graph.nodes[number]
        if name in _BOOKKEEPING:
            continue
        if name == "_iterations":
            saved.iterations = int(child.value)
            if era != NEW_KIND:
                saved.name = child.name.split("/")[-2] if "/" in child.name else None
        elif name == "_learning_rate":
            saved.learning_rate = None if child.value is None else float(child.value)
        elif child.value is not None:
            saved.others[name] = child.value
        else:
            for turn, at in child.children.items():
                if at in own and turn.isdecimal() and graph.nodes[at].value is not None:
                    slot = graph.nodes[at]
                    short, of = split_label(slot.name)
                    same = by_name.get(of, []) if era == NEW_KIND else []
                    variable = references.children.get(turn, same[0] if len(same) == 1 else None)
                    names = [name, short] if era == NEW_KIND else [name]
                    saved.slots.append(
                        SavedSlot(names, slot.value, variable, int(turn), label=slot.name)
                    )
    return saved

"""The content of a checkpoint: objects that refer to each other, and their arrays.

It is read from a `tf.train.Checkpoint`, or from the HDF5 file that `migrate_file` makes from one
and that can be read without TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lossscale.errors import OldFileError
from lossscale_migration.damaged_files import is_hdf5, reporting_file_errors

_VALUE = "VARIABLE_VALUE"
_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_DATASET = "lossscale_object_graph"


@dataclasses.dataclass
class Node:
    """One object of a checkpoint.

    Args:
        children: Maps each attribute that holds an object to the number of its node.
        name: The name of the variable; "" if the object is not a variable.
        value: The array of the variable, or None.
        slots: For an optimizer: (name, number of the variable's node, number of the slot's node).
        extras: Further numbers that the object saved, by name.
    """

    children: dict[str, int] = dataclasses.field(default_factory=dict)
    name: str = ""
    value: Any = None
    slots: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    extras: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Graph:
    """All objects of a checkpoint; the first one is the root.

    Args:
        path: The file, for messages.
        nodes: The objects.
    """

    path: str
    nodes: list[Node]

    def child(self, node: Node, name: str) -> Node:
        """Returns the child `name` of `node`, an empty node if there is none."""
        return self.nodes[node.children[name]] if name in node.children else Node()

    def value(self, node: Node, name: str) -> Any:
        """Returns the array of the child `name` of `node`, or None."""
        return self.child(node, name).value

    def paths(self, start: int = 0) -> Iterator[tuple[str, Node]]:
        """Yields every object below another one once, by its shortest path, the nearest first."""
        seen, waiting = {start}, [("", start)]
        while waiting:
            path, number = waiting.pop(0)
            yield path, self.nodes[number]
            for name, child in self.nodes[number].children.items():
                if child not in seen:
                    seen.add(child)
                    waiting.append((f"{path}/{name}".lstrip("/"), child))


def read_graph(path: str | Path) -> Graph:
    """Reads a checkpoint.

    Args:
        path: The prefix of a checkpoint, its `.index` file, a folder with checkpoints (then the
            latest), a SavedModel, or a file that `migrate_file` made from a checkpoint.

    Raises:
        OldFileError: If it does not exist or is damaged.
    """
    if is_hdf5(path):
        return _read_hdf5(str(path))
    return _read_checkpoint(find_prefix(path))


def find_prefix(path: str | Path) -> str:
    """Returns the prefix of the checkpoint at a path.

    Raises:
        OldFileError: If there is no checkpoint.
    """
    text = str(path)
    if Path(text).is_dir():
        if Path(text, "variables", "variables.index").is_file():
            return str(Path(text, "variables", "variables"))
        import tensorflow as tf

        latest = tf.train.latest_checkpoint(text)
        if latest is None:
            raise OldFileError(f"{text}: no checkpoint in this folder.")
        return str(latest)
    for prefix in (text.removesuffix(".index"), text.rpartition(".data-")[0]):
        if prefix and Path(f"{prefix}.index").is_file():
            return prefix
    if Path(text).is_file():
        raise OldFileError(f"{text}: neither a checkpoint of TensorFlow nor a model file.")
    raise OldFileError(f"{text}: no such file or checkpoint.")


def _read_checkpoint(prefix: str) -> Graph:
    import tensorflow as tf
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

    with reporting_file_errors(prefix):
        reader = tf.train.load_checkpoint(prefix)
        keys = reader.get_variable_to_shape_map()
        if _GRAPH_KEY not in keys:
            raise OldFileError(
                f"{prefix}: this checkpoint holds variables by name, not objects. Only files of "
                "tf.train.Checkpoint or save_weights can be read."
            )
        proto = TrackableObjectGraph.FromString(reader.get_tensor(_GRAPH_KEY))
        # Read all arrays first: a truncated file is found before anything changes.
        values = {key: reader.get_tensor(key) for key in keys if key != _GRAPH_KEY}
        return _checked(Graph(prefix, [_node(saved, values) for saved in proto.nodes]))


def _node(saved: Any, values: dict[str, Any]) -> Node:
    node = Node(children={child.local_name: child.node_id for child in saved.children})
    for attribute in saved.attributes:
        value: Any = values.get(attribute.checkpoint_key)
        if value is None:
            continue
        if attribute.name == _VALUE:
            node.name = attribute.full_name
            node.value = value
        elif np.shape(value) == () and np.asarray(value).dtype.kind in "biuf":
            node.extras[attribute.name] = np.asarray(value).item()
    node.slots = [
        (slot.slot_name, slot.original_variable_node_id, slot.slot_variable_node_id)
        for slot in saved.slot_variables
    ]
    return node


def _checked(graph: Graph) -> Graph:
    """Returns the graph after checking that it contains every object that it refers to."""
    numbers = range(len(graph.nodes))
    if not graph.nodes:
        raise OldFileError(f"{graph.path}: damaged: contains no objects.")
    for node in graph.nodes:
        named = [*node.children.values(), *(at for _, *both in node.slots for at in both)]
        if not all(isinstance(at, int) and at in numbers for at in named):
            raise OldFileError(
                f"{graph.path}: damaged: refers to objects that it does not contain."
            )
    return graph


def write_hdf5(graph: Graph, path: str | Path) -> None:
    """Writes a graph as an HDF5 file.

    Args:
        graph: The graph.
        path: The new file.
    """
    import h5py

    # The arrays are stored under their numbers.
    described = [{**vars(node), "value": node.value is not None} for node in graph.nodes]
    with h5py.File(path, "w") as file:
        # A dataset, because an attribute holds at most 64 KiB.
        file.create_dataset(_DATASET, data=json.dumps(described))
        for number, node in enumerate(graph.nodes):
            if node.value is not None:
                file.create_dataset(f"values/{number}", data=node.value)


def holds_graph(path: str | Path) -> bool:
    """Whether `write_hdf5` wrote an HDF5 file."""
    import h5py

    with reporting_file_errors(path), h5py.File(path, "r") as file:
        return _DATASET in file


def _read_hdf5(path: str) -> Graph:
    import h5py

    if not holds_graph(path):
        raise OldFileError(
            f"{path}: this HDF5 file was not written by `lossscale-migrate` from a checkpoint. "
            "Load a model with lossscale_migration.load_model."
        )
    with reporting_file_errors(path), h5py.File(path, "r") as file:
        described = json.loads(file[_DATASET][()])
        for number, node in enumerate(described):
            node["name"] = str(node["name"])
            node["value"] = file[f"values/{number}"][()] if node["value"] else None
        return _checked(Graph(path, [Node(**node) for node in described]))

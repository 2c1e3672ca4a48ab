"""The sums over replicas in the graph of a step, Keras 3 on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from benchmarks.frameworks.replicas import Replicated
from benchmarks.methods import METHODS, SCALE
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.workloads import Workload

_SUMS = ("CollectiveReduce", "CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce")
_BYTES_OF_FLOAT32 = 4


def measure(name: str, workload: Workload, devices: int) -> dict[str, int]:
    """Returns how often a replica takes part in a sum in one step, and of how many bytes."""
    program = Replicated(
        METHODS[name],
        workload,
        lambda **settings: OPTIMIZERS["Adam"](keras.optimizers, **settings),
        devices,
        scale=SCALE,
    )
    program.step()
    program.wait()
    graph = program.graph()
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    sums = [node for body in bodies for node in body if node.op in _SUMS]
    # The graph holds the nodes of all replicas.
    return {
        "sums": len(sums) // devices,
        "bytes": sum(_bytes(node) for node in sums) // devices,
    }


def _bytes(node: Any) -> int:
    (shape,) = node.attr["_output_shapes"].list.shape
    return int(np.prod([dimension.size for dimension in shape.dim])) * _BYTES_OF_FLOAT32

"""Whether the function that is being traced will be compiled by XLA."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

try:
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
except ImportError:  # A private name; without it XLA gets what graphs get, which is only slower.

    def GraphOrParentsInXlaContext(graph: Any) -> bool:  # noqa: N802
        return False


def in_xla() -> bool:
    """Whether a function with `jit_compile=True` is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))

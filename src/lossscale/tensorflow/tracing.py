"""Helpers for functions that are being traced: XLA, AutoGraph, and the order of operations.

In a graph, an operation runs only if a fetched result depends on it. In eager mode nothing has to
be translated, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lossscale.common.private_names import private_name
from lossscale.framework_types import Function, Operation, Scalar, Tensor

_AUTOGRAPH = "__internal__.autograph"
_TRANSLATE = "translate what users wrote where they called this library"
_tf_convert: Callable[..., Function] = private_name(
    "tensorflow", f"{_AUTOGRAPH}.tf_convert", _TRANSLATE
)
_control_status_ctx: Callable[[], object] = private_name(
    "tensorflow", f"{_AUTOGRAPH}.control_status_ctx", _TRANSLATE
)
_is_in_xla: Callable[[tf.Graph], bool] = private_name(
    "tensorflow.python.ops.control_flow_util",
    "GraphOrParentsInXlaContext",
    "see whether a function that is being traced will be compiled",
    # Without the name, XLA gets a branch as graphs do, which is only slower.
    fallback=lambda graph: False,
)


def in_xla() -> bool:
    """Whether a function with `jit_compile=True` is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(_is_in_xla(tf.compat.v1.get_default_graph()))


def translated(function: Function) -> Function:
    """Returns a callable of the user's, with Python branches on tensors in it turned into graphs.

    AutoGraph translates what it meets in a translated function, and ours are none
    (`common/private_names.py`).
    """
    if tf.executing_eagerly():
        return function
    return _tf_convert(function, _control_status_ctx(), convert_by_default=False)


def grouped(*results: object) -> Operation:
    """Returns one operation that waits for all of these; None in eager mode.

    Args:
        results: Operations, tensors and nested structures of them; other values are ignored.
    """
    if tf.executing_eagerly():
        return None
    return tf.group(*_in_graph(results))


def after(results: object, value: Callable[[], Scalar]) -> Scalar:
    """Returns the value of a callable, in a graph as a tensor that waits for `results`."""
    earlier = [] if tf.executing_eagerly() else _in_graph(results)
    if not earlier:
        return value()
    with tf.control_dependencies(earlier):
        return tf.identity(value())


def where(condition: Scalar, one: Scalar, other: Scalar) -> Tensor:
    """Like `tf.where` for scalars; adds no operation to a graph if the condition is a constant."""
    dtype = next((value.dtype for value in (one, other) if tf.is_tensor(value)), None)
    one, other = (tf.convert_to_tensor(value, dtype) for value in (one, other))
    decided = None if tf.executing_eagerly() else tf.get_static_value(condition)
    if decided is not None:
        return one if decided else other
    # `tf.where` prepares to broadcast: six of them took 0.07 of a step of one variable.
    return tf.raw_ops.Select(condition=condition, x=one, y=other)


def _in_graph(results: object) -> list[Operation]:
    local_results = tf.distribute.get_strategy().experimental_local_results
    return [
        part
        for value in tf.nest.flatten(results)
        for part in local_results(value)
        if isinstance(part, (tf.Operation, tf.Tensor)) or hasattr(part, "_as_graph_element")
    ]

"""Where the operations of a step on TensorFlow would run on a GPU, by TensorFlow's own list.

The wheel `tensorflow` has the kernels for GPUs, though none is needed to ask for them.
"""

import collections

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from benchmarks.methods import METHODS

# They contain or call other operations, or run nothing.
CONTROL = {"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"}
NONE = CONTROL | {"Placeholder", "NoOp", "Const", "PartitionedCall", "StatefulPartitionedCall"}
# Handles of variables and shapes are on the host from the beginning.
ON_HOST = {"resource", "reduction_indices", "axis", "shape", "dims", "begin", "end", "strides"}
LAYOUTS = {"few": [(300, 300)] * 3, "many": [(10,)] * 5 + [(200, 200)] * 2}
OURS = ("ours_dynamic", "ours_fixed", "ours_monitored")


def operations(function, *given):
    """How often each operation is in a traced function, with the dtypes that it is for."""
    graph = tf.function(function).get_concrete_function(*given).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return collections.Counter(
        (node.op, tuple(sorted((k, v.type) for k, v in node.attr.items() if v.type)))
        for node in nodes
    )


def step(name, optimizer, shapes, dtype, injected=lambda gradient: gradient):
    """The operations of `apply`."""
    wrapped, inner = METHODS[name].wrapped, lambda: getattr(keras.optimizers, optimizer)(0.1)
    made = inner() if wrapped is None else wrapped(inner, keras)
    made.build([keras.Variable(tf.ones(shape)) for shape in shapes])
    if wrapped is not None:
        made.scale_loss(1.0)

    def applied(*gradients):
        made.apply([injected(gradient) for gradient in gradients])

    return operations(applied, *(tf.TensorSpec(shape, dtype) for shape in shapes))


def on_the_host(operation):
    """Whether an operation has no kernel for GPUs, or one that reads the host's memory."""
    name, dtypes = operation
    dtypes = dict(dtypes)
    for kernel in kernels.get_registered_kernels_for_op(name).kernel:
        fits = all(
            dtypes.get(c.name) in (None, *c.allowed_values.list.type) for c in kernel.constraint
        )
        if kernel.device_type in ("GPU", "DEFAULT") and fits:
            return not ON_HOST.issuperset(kernel.host_memory_arg)
    return True


def added(found, bare):
    return [each for each in found if each[0] not in NONE and found[each] > bare[each]]


def booleans(found):
    """How many values the host reads to know what to run."""
    return sum(number for (name, _), number in found.items() if name in CONTROL)


@pytest.fixture(autouse=True)
def _the_wheel_has_kernels_for_gpus():
    found = kernels.get_registered_kernels_for_op("MatMul").kernel
    assert "GPU" in {kernel.device_type for kernel in found}, "not the wheel `tensorflow`"


# Each with each of the others in pairs: no operation depends on all three.
@pytest.mark.parametrize(
    ("optimizer", "dtype", "layout"),
    [
        ("Adam", "float32", "many"),
        ("Adam", "float16", "few"),
        ("SGD", "float32", "few"),
        ("SGD", "float16", "many"),
    ],
)
def test_each_operation_that_loss_scaling_adds_runs_on_a_gpu(optimizer, dtype, layout):
    shapes = LAYOUTS[layout]
    bare, peer = (step(each, optimizer, shapes, dtype) for each in ("bare", "peer_dynamic"))
    for name in OURS:
        found = step(name, optimizer, shapes, dtype)
        assert [each for each in added(found, bare) if on_the_host(each)] == [], name
        # A monitor counts in a branch of its own.
        assert booleans(found) <= booleans(peer) + (name == "ours_monitored"), name
        assert booleans(found) == 0 or name != "ours_fixed"


INJECTED = {
    "through_text": lambda g: tf.strings.to_number(tf.strings.as_string(g), g.dtype),
    "by_python": lambda g: tf.reshape(tf.numpy_function(lambda x: x, [g], g.dtype), g.shape),
    # The kernel for GPUs takes the end from the host's memory.
    "by_a_number_of_the_host": lambda g: g + tf.reduce_sum(tf.range(0.0, g[0, 0], 1.0)),
}


@pytest.mark.parametrize("injected", INJECTED.values(), ids=INJECTED)
def test_an_operation_of_the_host_would_be_noticed(injected):
    shapes = LAYOUTS["few"]
    found, bare = (step("bare", "SGD", shapes, "float32", f) for f in (injected, lambda g: g))
    assert [each for each in added(found, bare) if on_the_host(each)]

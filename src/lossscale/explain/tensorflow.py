"""Finds the first operation of a TensorFlow graph whose result is not finite.

Forward and backward pass are one graph, which is evaluated operation by operation. So are the
graphs that it calls, also in loops and branches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from lossscale.common.private_names import private_name
from lossscale.explain.origins import Call, Evaluation, Value, Watched, line_of
from lossscale.framework_types import Library, Operation, Scalar, Structure, Tensor

_loaded: Library = private_name(
    "tensorflow.python.framework", "function_def_to_graph", "explain a loop of TensorFlow 1"
)
_execute: Library = private_name("tensorflow.python.eager.execute", "quick_execute", "explain")
_context: Library = private_name("tensorflow.python.eager.context", "context", "explain")
_BACKWARD = "gradient_tape/"
_NARROW = (tf.float16, tf.bfloat16, tf.float32)

Graph: TypeAlias = Any
"""A `tf.Graph`."""


class GraphWatch:
    """Evaluates the graph of a function.

    Args:
        compute: Returns the loss and its gradients for a nest of tensors and a loss scale.
        arrays: The tensors.
        names: The name of each, and whether it is a parameter.
        plain: Returns the name of a layer for the path of an operation.
    """

    def __init__(
        self,
        compute: Callable[[Structure, Scalar], Structure],
        arrays: Structure,
        names: Sequence[tuple[str, bool]],
        plain: Callable[[str], str],
    ) -> None:
        # A graph would read a variable by an operation, so that its origin were not known.
        arrays = tf.nest.map_structure(
            lambda each: tf.convert_to_tensor(each) if tf.is_tensor(each) else each, arrays
        )
        flat = [each for each in tf.nest.flatten(arrays) if each is not None]
        self._names, self._plain = dict(zip(map(id, flat), names, strict=True)), plain
        traced = functools.partial(compute, arrays)
        self._traced = tf.compat.v1.wrap_function(traced, [tf.TensorSpec([], tf.float32)])
        found = tf.nest.flatten(self._traced.structured_outputs)
        self._outputs = [each for each in found if each is not None]
        operations = self._traced.graph.get_operations()
        self._backward = set(operations[operations.index(found[0].op) + 1 :])

    def __call__(self, scale: float) -> Watched:
        """Evaluates it, and returns the origins of what is not finite."""
        graph = self._traced.graph
        read = [tf.constant(scale, tf.float32), *(outer for outer, _ in graph.captures)]
        named = [(each, *self._names.get(id(each), ("", False))) for each in read]
        self._evaluation = Evaluation()
        return self._evaluation.evaluated(
            named, lambda given: self._evaluate(graph, given, self._outputs)
        )

    def _evaluate(
        self,
        graph: Graph,
        given: Sequence[Value],
        outputs: Sequence[Tensor],
        callers: Sequence[Operation] = (),
    ) -> list[Value]:
        """Returns outputs of a graph."""
        known = dict(zip([each.ref() for each in graph.inputs], given, strict=True))
        waiting = _needed(graph, outputs)
        # More than once: the derivative of a loop gives it inputs that come after it.
        while waiting:
            later = []
            for operation in waiting:
                read = [each.ref() for each in operation.inputs]
                if not known.keys() >= set(read):
                    later.append(operation)
                    continue
                made = self._called([*callers, operation], [known[key] for key in read])
                known.update(zip([each.ref() for each in operation.outputs], made, strict=True))
            waiting = later
        return [known[each.ref()] for each in outputs]

    def _called(self, nested: Sequence[Operation], inputs: Sequence[Value]) -> Sequence[Value]:
        """Returns the results of an operation, which comes after its callers."""
        if (inner := self._inner(nested, inputs)) is not None:
            return inner
        operation = nested[-1]
        given = [value for value, _ in inputs]
        made = _computed(operation, given)
        is_list = any(each.dtype == tf.variant for each in made)
        found = next((origin for _, origin in inputs if origin), None)
        if found and (is_list or operation.type.startswith("MaxPool")):
            # A list of tensors has numbers only once they are taken out of it, and the largest of
            # several NaN is the lowest number.
            return [(each, found) for each in made]
        in_backward = nested[0] in self._backward
        calls = reversed(operation.traceback or ())
        line = line_of((each.filename, each.lineno, each.name) for each in calls)
        module = self._plain(_module(operation.name)) or line
        shown = f"backward of {_derived(operation)}" if in_backward else operation.type
        widened = functools.partial(_computed, operation, given, wide=True)
        call = Call(operation.type.lower(), shown, module, in_backward, widened)
        return list(zip(made, self._evaluation.origins(call, inputs, made), strict=True))

    def _inner(
        self, nested: Sequence[Operation], inputs: Sequence[Value]
    ) -> Sequence[Value] | None:
        """Evaluates the graphs that an operation calls; None if it calls none."""
        attribute = nested[-1].get_attr

        def evaluate(name: str, inputs: Sequence[Value]) -> list[Value]:
            graph = _graph_of(nested[-1].graph, name)
            return self._evaluate(graph, inputs, graph.outputs, nested)

        match nested[-1].type.removeprefix("Stateless").removeprefix("Stateful"):
            case "PartitionedCall":
                return evaluate(attribute("f").name, inputs)
            case "If":
                branch = attribute("then_branch" if bool(inputs[0][0]) else "else_branch")
                return evaluate(branch.name, inputs[1:])
            case "Case":
                branches, number = attribute("branches"), int(inputs[0][0])
                # As documented, what is out of range is the last one.
                chosen = branches[number if 0 <= number < len(branches) else -1]
                return evaluate(chosen.name, inputs[1:])
            case "While":
                test, body = attribute("cond").name, attribute("body").name
                while bool(evaluate(test, inputs)[0][0]):
                    inputs = evaluate(body, inputs)
                return inputs
            case name if nested[-1].graph._is_function(name):
                return evaluate(name, inputs)
        return None


def _graph_of(caller: Graph, name: str) -> Graph:
    """The graph of a function that an operation calls."""
    function = caller._get_function(name)
    if hasattr(function, "graph"):
        return function.graph
    # Those of TensorFlow 1, which its CTC loss has, have a definition only.
    with caller.as_default():
        return _loaded.function_def_to_graph(function.definition, include_library_functions=True)


def _needed(graph: Graph, outputs: Sequence[Tensor]) -> list[Operation]:
    """The operations of a graph that compute its outputs, in the order of the program."""
    needed, waiting = {each.op for each in graph.inputs}, [each.op for each in outputs]
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [each.op for each in operation.inputs]
    needed -= {each.op for each in graph.inputs}
    return [each for each in graph.get_operations() if each in needed]


# --- Operations ---------------------------------------------------------------------------------


def _computed(operation: Operation, given: Sequence[Tensor], *, wide: bool = False) -> list[Tensor]:
    """The results of an operation, which may be computed in float64."""
    if operation.type in ("CheckNumerics", "CheckNumericsV2"):
        # It would raise what is to be explained.
        return [tf.identity(given[0])]
    if operation.type == "Const":
        return [tf.constant(tf.make_ndarray(operation.get_attr("value")))]

    def wider(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(wider, value))
        if isinstance(value, tf.DType):
            return tf.float64 if wide and value in _NARROW else value
        return tf.TensorShape(value) if hasattr(value, "unknown_rank") else value

    inputs = [
        tf.cast(each, wider(t.dtype)) if t.dtype.is_floating else each
        for each, t in zip(given, operation.inputs, strict=True)
    ]
    attributes: list[object] = []
    for each in operation.op_def.attr:
        attributes += [each.name, wider(operation.get_attr(each.name))]
    call = operation.type, len(operation.outputs), inputs, tuple(attributes)
    return list(_execute(*call, _context()))


def _module(path: str) -> str:
    """The path of the layer in the name of an operation."""
    return path.removeprefix(_BACKWARD).rpartition("/")[0]


def _derived(operation: Operation) -> str:
    """The name of the operation that an operation of the backward pass belongs to."""
    forward = _module(operation.name)
    with contextlib.suppress(KeyError, ValueError):
        return str(operation.graph.get_operation_by_name(forward).type)
    return str(operation.type).removesuffix("Grad")

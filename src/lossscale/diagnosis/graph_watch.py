"""Finds the first operation of a TensorFlow graph whose result is not finite.

Forward and backward pass are one graph. It runs twice: for all flags, and for the numbers that the
operation that fails gets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.monitoring.explanation import LARGEST, FailedOperation, Origin
from lossscale.monitoring.origins import Flags, Watched, is_harmed, overflow_in, passed_on

_BACKWARD = "gradient_tape/"
_SETTERS = ("Const", "Fill", "BroadcastTo", "Select", "SelectV2", "PadV2")
_ADDING = ("AddV2", "Add", "Maximum", "BiasAdd")
_SINGULAR = ("Div", "Rsqrt", "Sqrt", "Log", "Pow", "Reciprocal", "Inv", "Xlogy", "Acos", "Asin")
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_CONCISE_HEALTH = 3
"""The mode of `DebugNumericSummaryV2` that counts infinities and NaN."""
_SMALL = 2.0**-14
"""The smallest float16 number with all digits."""


class GraphWatch:
    """Watches the operations of a function.

    Args:
        compute: Returns the loss and a list of gradients, or None for some.
        names: The origin of what is not finite in a tensor that the function reads, by its id.
        epsilons: What `small_numbers` returns for the same pass in float32.
        plain: Returns the name of a layer for the path of an operation.
    """

    def __init__(
        self,
        compute: Callable[[Any], Any],
        names: Mapping[int, Origin],
        epsilons: Mapping[str, float],
        plain: Callable[[str], str],
    ) -> None:
        self._epsilons, self._plain = epsilons, plain
        self._traced = tf.compat.v1.wrap_function(compute, [tf.TensorSpec([], tf.float32)])
        graph = self._traced.graph
        self._names = {
            inner.ref(): names[id(outer)] for outer, inner in graph.captures if id(outer) in names
        }
        self._operations = [each for each in graph.get_operations() if each.outputs]
        floats = [t for each in self._operations for t in each.outputs if t.dtype in _FLOATS]
        self._places = {tensor.ref(): place for place, tensor in enumerate(floats)}
        with graph.as_default():
            self._counts = self._pruned(tf.stack(list(map(_counts, floats))))

    def _pruned(self, fetches: Any) -> Any:
        return self._traced.prune(self._traced.inputs[:1], fetches)

    def __call__(self, scale: float) -> Watched:
        """Computes the pass, and returns the origins of what is not finite."""
        self._scale = tf.constant(scale, tf.float32)
        self._found, self._in_float16 = self._counts(self._scale).numpy(), False
        origins: dict[Any, Origin] = {}
        hidden: Origin | None = None
        for operation in self._operations:
            taken = [
                (origins[t.ref()], self._of(t)) for t in operation.inputs if t.ref() in origins
            ]
            for tensor in operation.outputs:
                self._in_float16 |= tensor.dtype == tf.float16
                flags = self._of(tensor)
                if any(flags):
                    origins[tensor.ref()] = self._origin(operation, tensor, flags, taken)
                elif taken and not hidden and self._is_harmed(operation):
                    hidden = overflow_in(taken)
        loss, *gradients = [
            None if each is None else origins.get(each.ref())
            for each in self._traced.structured_outputs
        ]
        real = [each for each in gradients if each is not None and not each.is_mask]
        return Watched(loss, next(iter(real), None), hidden)

    def _of(self, tensor: Any) -> Flags:
        place = self._places.get(tensor.ref())
        if place is None:
            return Flags()
        _, _, negative, positive, nans = self._found[place]
        return Flags(bool(nans), bool(negative + positive))

    def _given(self, operation: Any) -> list[Any]:
        """The numbers that an operation takes."""
        wanted = [t for t in operation.inputs if t.dtype not in (tf.resource, tf.variant)]
        return [each.numpy() for each in self._pruned(wanted)(self._scale)]

    def _is_harmed(self, operation: Any) -> bool:
        """Whether an operation makes another number of an infinity than of 65,504."""
        if _BACKWARD in operation.name:
            return False
        given = self._given(operation)
        limits: dict[str, Any] = {"nan": math.nan, "posinf": LARGEST, "neginf": -LARGEST}
        lower = [
            np.nan_to_num(a, **limits) if np.issubdtype(a.dtype, np.floating) else a for a in given
        ]
        made, other = _repeated(operation, given), _repeated(operation, lower)
        pairs = zip(made or [], other or [], strict=True)
        return any(is_harmed(_largest(one - another), _largest(another)) for one, another in pairs)

    def _origin(
        self,
        operation: Any,
        tensor: Any,
        flags: Flags,
        taken: Sequence[tuple[Origin, Flags]],
    ) -> Origin:
        if tensor.ref() in self._names:
            return self._names[tensor.ref()]
        in_backward = _BACKWARD in operation.name
        sets = operation.type in _SETTERS and not taken
        old = passed_on(taken, flags, sets=sets, in_backward=in_backward)
        if old is not None:
            return old
        given = self._given(operation)
        is_cast, module = operation.type == "Cast", _module(operation.name)
        floats = [
            a.astype(np.float64) for a in given if is_cast or np.issubdtype(a.dtype, np.floating)
        ]
        decisive = (floats[1:] or floats) if "Div" in operation.type else floats[:1]
        cast_of = self._names.get(operation.inputs[0].ref(), Origin())
        return Origin(
            FailedOperation(
                f"backward of {_derived(operation)}" if in_backward else operation.type,
                self._plain(module),
                in_backward,
                largest_input=max(map(_largest, floats), default=0.0),
                largest_result=_largest(floats[0]) if is_cast else _wide(operation, given),
                meets_zero=any((each == 0).any() for each in decisive),
                meets_negative=any((each < 0).any() for each in decisive),
                of_infinities=bool(taken),
                cast_of=cast_of.name if is_cast and cast_of.is_weight else "",
                is_cast=is_cast,
                epsilon=self._epsilons.get(self._plain(module), 0.0),
                in_float16=self._in_float16,
            )
        )


def _counts(tensor: Any) -> Any:
    """A number, the size, and the counts of -inf, inf and NaN of a tensor.

    One operation for each tensor, since a graph takes longer to build than to run.
    """
    return tf.raw_ops.DebugNumericSummaryV2(
        input=tensor, output_dtype=tf.float32, tensor_debug_mode=_CONCISE_HEALTH
    )


def _module(name: str) -> str:
    """The path of the layer in the name of an operation."""
    parts = name.removeprefix(_BACKWARD).split("/")[:-1]
    return "/".join(parts)


def _derived(operation: Any) -> str:
    """The name of the operation that an operation of the backward pass belongs to."""
    forward = operation.name.removeprefix(_BACKWARD).rpartition("/")[0]
    with contextlib.suppress(KeyError, ValueError):
        return str(operation.graph.get_operation_by_name(forward).type)
    return str(operation.type).removesuffix("Grad")


def small_numbers(
    compute: Callable[[Any], Any], plain: Callable[[str], str]
) -> Iterator[tuple[str, float]]:
    """Numbers that are added, and that float16 rounds to few digits or to 0, by their layer."""
    traced = tf.compat.v1.wrap_function(compute, [tf.TensorSpec([], tf.float32)])
    for operation in traced.graph.get_operations():
        if operation.type in _ADDING:
            for tensor in operation.inputs:
                value = tf.get_static_value(tensor) if tensor.dtype.is_floating else None
                if value is not None and np.ndim(value) == 0 and 0 < abs(float(value)) < _SMALL:
                    yield plain(_module(operation.name)), abs(float(value))


def _largest(array: Any) -> float:
    """The largest finite magnitude in an array; 0 if there is none."""
    return float(np.abs(np.nan_to_num(array, nan=0, posinf=0, neginf=0)).max(initial=0))


def _wide(operation: Any, given: Sequence[Any]) -> float | None:
    """The largest magnitude that an operation computes in float64; None if not finite."""
    arrays = _repeated(operation, given)
    if arrays is None:
        return None if any(part in operation.type for part in _SINGULAR) else math.inf
    finite = all(np.isfinite(each).all() for each in arrays)
    return max(map(_largest, arrays), default=0.0) if finite else None


def _repeated(operation: Any, given: Sequence[Any]) -> list[Any] | None:
    """The result of an operation in float64; None if it does not exist in float64."""
    definition = operation.op_def
    narrow = (tf.float16, tf.bfloat16, tf.float32)

    def wider(value: Any) -> Any:
        return tf.float64 if isinstance(value, tf.DType) and value in narrow else value

    with contextlib.suppress(Exception):
        inputs = [
            tf.constant(each, tf.float64) if t.dtype in narrow else tf.constant(each)
            for each, t in zip(given, operation.inputs, strict=True)
        ]
        arguments: dict[str, Any] = {}
        for argument in definition.input_arg:
            count = operation.get_attr(argument.number_attr) if argument.number_attr else None
            part = inputs[: 1 if count is None else count]
            inputs = inputs[len(part) :]
            arguments[argument.name] = part[0] if count is None else part
        inferred = {a.type_attr for a in definition.input_arg} | {
            a.number_attr for a in definition.input_arg
        }
        for attribute in definition.attr:
            if attribute.name not in inferred:
                arguments[attribute.name] = wider(operation.get_attr(attribute.name))
        made = getattr(tf.raw_ops, operation.type)(**arguments)
        return [each.numpy() for each in tf.nest.flatten(made) if each.dtype.is_floating]
    return None

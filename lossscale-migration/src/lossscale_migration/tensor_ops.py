"""TensorFlow operations in functional models, translated to `keras.ops`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from keras import ops

from lossscale.errors import OldFileError

# Layers that Keras 2 created for operations on tensors; the file names each operation.
OP_LAYERS = (
    "AddLoss",
    "AddMetric",
    "ClassMethod",
    "InstanceMethod",
    "InstanceProperty",
    "SlicingOpLambda",
    "TFOpLambda",
    "TensorFlowOpLayer",
)

_ELEMENTWISE_1 = [
    "abs",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "expm1",
    "floor",
    "log",
    "log1p",
    "negative",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "softplus",
    "softsign",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
_ELEMENTWISE_2 = [
    "add",
    "divide",
    "equal",
    "floordiv",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "logical_and",
    "logical_or",
    "maximum",
    "minimum",
    "multiply",
    "not_equal",
    "pow",
    "subtract",
    "truediv",
]
_ACTIVATIONS = [
    "elu",
    "gelu",
    "leaky_relu",
    "log_softmax",
    "relu",
    "relu6",
    "selu",
    "silu",
    "swish",
]
_REDUCTIONS = {
    "reduce_all": "all",
    "reduce_any": "any",
    "reduce_logsumexp": "logsumexp",
    "reduce_max": "max",
    "reduce_mean": "mean",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_std": "std",
    "reduce_sum": "sum",
    "reduce_variance": "var",
    "argmax": "argmax",
    "argmin": "argmin",
}
_NAMES = {"floordiv": "floor_divide", "pow": "power", "truediv": "true_divide", "swish": "silu"}


def tensor_op(described: dict[str, Any], inputs: Any, kwargs: dict[str, Any], what: str) -> Any:
    """Returns the result of a TensorFlow operation, computed with `keras.ops`.

    Args:
        described: The layer that represents the operation in the file.
        inputs: Its first argument: tensors, numbers, and lists of them.
        kwargs: The other arguments, by TensorFlow's names.
        what: The file and the layer, for the message.

    Raises:
        OldFileError: If the operation is not supported.
    """
    symbol = str(described["config"].get("function", ""))
    parts = symbol.split(".")
    operation = _OPERATIONS.get(parts[-1]) if set(parts[:-1]) <= _MODULES else None
    kwargs = {name: value for name, value in kwargs.items() if name != "name"}
    if operation is None or (described["class_name"] not in ("TFOpLambda", "SlicingOpLambda")):
        called = f"tf.{symbol}" if symbol else "what only TensorFlow can do"
        raise OldFileError(
            f"{what} uses {called}, which is not supported. Create the model with Keras 3 "
            "(keras.ops has the operations), and restore a checkpoint of it with "
            "restore_checkpoint."
        )
    return operation(inputs, **kwargs)


_MODULES = {"__operators__", "compat", "keras", "activations", "linalg", "math", "nn", "v1"}


def _tensor(value: Any, like: Any) -> Any:
    # Lists of numbers were constants with the dtype of the other argument.
    if isinstance(value, (list, tuple)):
        return ops.convert_to_tensor(value, dtype=getattr(like, "dtype", None))
    return value


def _unary_op(name: str) -> Callable[..., Any]:
    return lambda x: getattr(ops, _NAMES.get(name, name))(x)


def _binary_op(name: str) -> Callable[..., Any]:
    def operation(x: Any, y: Any) -> Any:
        return getattr(ops, _NAMES.get(name, name))(_tensor(x, y), _tensor(y, x))

    return operation


def _activation(name: str) -> Callable[..., Any]:
    def operation(features: Any, alpha: float = 0.2, **rest: Any) -> Any:
        if name == "leaky_relu":
            return ops.leaky_relu(features, negative_slope=alpha, **rest)
        if name == "gelu":
            return ops.gelu(features, approximate=rest.get("approximate", False))
        return getattr(ops, _NAMES.get(name, name))(features, **rest)

    return operation


def _reduction(name: str) -> Callable[..., Any]:
    def operation(x: Any, axis: Any = None, keepdims: bool | None = False, **rest: Any) -> Any:
        if "arg" in name:
            # TensorFlow's own default is the first axis.
            return ops.cast(getattr(ops, name)(x, axis=axis or 0), "int64")
        axis = tuple(axis) if isinstance(axis, list) else axis
        return getattr(ops, name)(x, axis=axis, keepdims=bool(keepdims), **rest)

    return operation


def _sliced(x: Any, slice_spec: Any) -> Any:
    index: list[Any] = []
    for one in slice_spec if isinstance(slice_spec, list) else [slice_spec]:
        if isinstance(one, dict) and one.get("class_name") == "__ellipsis__":
            index.append(...)
        elif isinstance(one, dict):
            index.append(slice(one["start"], one["stop"], one["step"]))
        else:
            index.append(one)
    return x[tuple(index)]


def _matmul(
    a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False, **rest: Any
) -> Any:
    def turned(x: Any, turn: bool) -> Any:
        return ops.swapaxes(x, -1, -2) if turn else x

    if any(rest.values()):
        raise ValueError(f"unsupported arguments: {rest}")
    return ops.matmul(turned(_tensor(a, b), transpose_a), turned(_tensor(b, a), transpose_b))


def _split(value: Any, num_or_size_splits: Any, axis: int = 0, num: Any = None) -> Any:
    sizes = num_or_size_splits
    if isinstance(sizes, list):
        # Keras takes the ends of all parts but the last.
        sizes = list(itertools.accumulate(sizes[:-1]))
    return ops.split(value, sizes, axis=axis)


def _clip(t: Any, clip_value_min: float, clip_value_max: float) -> Any:
    return ops.clip(t, clip_value_min, clip_value_max)


def _softmax(logits: Any, axis: Any = -1) -> Any:
    return ops.softmax(logits, axis=-1 if axis is None else axis)


def _cast(x: Any, dtype: Any) -> Any:
    # 2.4 wrote {"class_name": "TypeSpec"...} or a name.
    return ops.cast(x, dtype if isinstance(dtype, str) else dtype["config"])


def _pad(tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: float = 0) -> Any:
    if mode.upper() != "CONSTANT":
        return ops.pad(tensor, paddings, mode=mode.lower())
    return ops.pad(tensor, paddings, constant_values=constant_values)


def _l2_normalize(x: Any, axis: Any = None, epsilon: float = 1e-12) -> Any:
    squares = ops.sum(ops.square(x), axis=axis, keepdims=True)
    return ops.multiply(x, ops.rsqrt(ops.maximum(squares, epsilon)))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary_op(name) for name in _ELEMENTWISE_1},
    **{name: _binary_op(name) for name in _ELEMENTWISE_2},
    **{name: _activation(name) for name in _ACTIVATIONS},
    **{name: _reduction(other) for name, other in _REDUCTIONS.items()},
    "add_n": lambda inputs: sum(inputs[1:], inputs[0]),
    "cast": _cast,
    "clip_by_value": _clip,
    "concat": lambda values, axis: ops.concatenate(values, axis=axis),
    "expand_dims": lambda input, axis: ops.expand_dims(input, axis),
    "getitem": _sliced,
    "identity": lambda input: ops.multiply(input, 1),
    "l2_normalize": _l2_normalize,
    "logical_not": lambda x: ops.logical_not(x),
    "matmul": _matmul,
    "pad": _pad,
    "repeat": lambda input, repeats, axis=None: ops.repeat(input, repeats, axis=axis),
    "reshape": lambda tensor, shape: ops.reshape(tensor, tuple(shape)),
    "softmax": _softmax,
    "split": _split,
    "squared_difference": lambda x, y: ops.square(ops.subtract(x, y)),
    "squeeze": lambda input, axis=None: ops.squeeze(input, axis),
    "stack": lambda values, axis=0: ops.stack(values, axis=axis),
    "stop_gradient": lambda input: ops.stop_gradient(input),
    "tile": lambda input, multiples: ops.tile(input, multiples),
    "transpose": lambda a, perm=None, conjugate=False: ops.transpose(a, axes=perm),
    "where": lambda condition, x, y: ops.where(condition, x, y),
}

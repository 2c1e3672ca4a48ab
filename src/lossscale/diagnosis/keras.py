"""Gradients of a Keras 3 model in float32 and in float16, and the ranges of its operations.

A pass runs in a `keras.StatelessScope`, which takes every assignment to a variable: statistics of
normalizations, states of random seeds, metrics. In the reference, all layers compute in float32,
whatever their dtype policy; in float16, layers that did not ask for a dtype compute as under
`mixed_float16`. Every attribute of every layer is restored after each pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from lossscale.common.monkeypatch import replace
from lossscale.diagnosis.gradient_function import (
    TARGETS,
    LossGradients,
    OutputRange,
    checked_losses,
    numbered,
)
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.keras import backends
from lossscale.keras.private_names import backend_functions, current_path, random_functions

_NARROW = ("float16", "bfloat16")
_WIDER = ("float32", "float64", "bfloat16")


class KerasGradientFunction:
    """The passes of a Keras 3 model; see `lossscale.diagnosis.gradient_function.GradientFunction`.

    Args:
        model: A `keras.Model` that has its variables.
        loss_fn, parameters: As for `lossscale.diagnosis.diagnose`.

    Attributes:
        setting: What the model computes with, in words.

    Raises:
        ArgumentError: If its loss is not known, or it has no variables.
        ArgumentTypeError: If `loss_fn` is not a function.
    """

    def __init__(self, model: Any, loss_fn: Any = None, parameters: Any = None) -> None:
        _check_arguments(model, loss_fn)
        # Refuses unsupported backends.
        backends.load()
        self._model, self._loss_fn = model, loss_fn
        self._trained = list(model.trainable_variables)
        trained = set(map(id, self._trained))
        self._variables = [*self._trained, *(v for v in model.variables if id(v) not in trained)]
        counts: Counter[str] = Counter()
        self._names = [numbered(_inside(v.path, model), counts) for v in self._trained]
        self._owned = {name: set(map(id, each)) for name, each in (parameters or {}).items()}
        self._casts = _cast_to_float16(model)
        how = "mixed_float16" if self._casts else "its own float16"
        self.setting = f"Keras on {keras.backend.backend()}, {how}"
        self._computations: dict[tuple[bool, bool], Any] = {}

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns the gradients of each loss."""
        on_jax = keras.backend.backend() == "jax"
        # Compiling a second function would cost more than always recording ranges.
        key = half, watch or (half and on_jax)
        if key not in self._computations:
            compute: Any = functools.partial(self._compute, *key)
            if on_jax:
                import jax

                # It must round to float16 wherever the model casts to it.
                exactly = {"xla_allow_excess_precision": False}
                compute = jax.jit(compute, compiler_options=exactly)
            self._computations[key] = compute
        with _as_it_was(self._model), _drawn_in_float32():
            self._set_precision(half)
            values = [_value(variable, half) for variable in self._variables]
            parts = (*batch, None, None)[:3]
            found, ranges = self._computations[key](values, parts, np.float32(scale))
        outputs = OutputRange.by_name(ranges)
        return {
            name: LossGradients(self._gradients_of(name, each), float(_on_host(loss)), outputs)
            for name, (loss, each) in found.items()
        }

    def _gradients_of(self, loss: str, gradients: Sequence[Any]) -> dict[str, Any]:
        """The gradients that a loss is judged by, by the names of their variables."""
        owned = self._owned.get(loss)
        return {
            name: None if gradient is None else _on_host(gradient)
            for name, variable, gradient in zip(self._names, self._trained, gradients, strict=True)
            if owned is None or id(variable) in owned
        }

    def _compute(
        self, half: bool, watch: bool, values: Sequence[Any], batch: Any, scale: Any
    ) -> Any:
        """Returns each loss with its gradients, and the range of the output of each operation."""
        count = len(self._trained)

        def forward(trained: Sequence[Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
            with _watched(self._model, watch) as returned:
                losses = self._forward([*trained, *values[count:]], batch, returned)
            losses = checked_losses(losses, keras.ops.is_tensor, self._owned)
            wide = {
                name: keras.ops.reshape(keras.ops.cast(loss, "float32"), ())
                for name, loss in losses.items()
            }
            return wide, returned if watch else {}

        derive = _DERIVE[keras.backend.backend()]
        losses, gradients, returned = derive(forward, values[:count], scale)
        ranges = OrderedDict()
        for name, tensors in returned.items():
            shown = [each for each in tensors if not half or _dtype(each) == "float16"]
            if shown:
                ranges[name] = _range(shown)
        return {name: (loss, gradients[name]) for name, loss in losses.items()}, ranges

    def _forward(self, values: Sequence[Any], batch: Any, returned: dict[str, list[Any]]) -> Any:
        """Returns what the loss function returns, and adds the targets to what is watched."""
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        for variable, value in zip(self._variables, values, strict=True):
            # Assigned after construction, which would round the value to the variable's dtype.
            scope.add_update((variable, value))
        x, y, sample_weight = keras.tree.map_structure(
            lambda array: None if array is None else keras.ops.convert_to_tensor(array), batch
        )
        with scope, _same_random_numbers():
            if self._loss_fn is not None:
                return self._loss_fn(self._model, (x, y, sample_weight))
            self._check_targets(y)
            training = {"training": True} if self._model._call_has_training_arg else {}
            y_pred = self._model(x, **training)
            for target, output in zip(*map(keras.tree.flatten, (y, y_pred)), strict=False):
                # Others, such as class numbers, are not values that an output should reach.
                if target is not None and math.prod(target.shape) == math.prod(output.shape):
                    cast = keras.ops.cast(target, output.dtype)
                    returned.setdefault(TARGETS, []).append(cast)
            return self._model._compute_loss(x, y, y_pred, sample_weight, training=True)

    def _check_targets(self, y: Any) -> None:
        is_own = type(self._model).compute_loss is not keras.Model.compute_loss
        losses = getattr(self._model._compile_loss, "_user_loss", None)
        if y is None and not is_own and any(keras.tree.flatten(losses)):
            raise ArgumentError(
                "`y` is missing, and the loss of this model needs targets. Pass them as `y`, or in "
                "batches (x, y)."
            )

    def _set_precision(self, half: bool) -> None:
        """Lets the model compute in float32 or in float16, past the tracking of Keras."""
        policy = keras.DTypePolicy("mixed_float16" if half else "float32")
        layers = self._casts
        if not half:
            layers = [
                layer
                for layer in self._model._flatten_layers()
                if layer.compute_dtype in _NARROW and layer.quantization_mode is None
            ]
        for layer in layers:
            vars(layer)["_dtype_policy"] = policy
        loss = getattr(self._model, "_compile_loss", None)
        if loss is not None:
            # A fresh copy, which is built on its first call.
            vars(self._model)["_compile_loss"] = type(loss)(
                loss._user_loss, loss._user_loss_weights, output_names=loss.output_names
            )


# --- What differs between backends ----------------------------------------------------------------


def _derive_on_jax(forward: Any, values: Sequence[Any], scale: Any) -> Any:
    import jax
    import jax.numpy as jnp

    losses, pull, returned = jax.vjp(forward, list(values), has_aux=True)
    gradients = {
        name: pull({each: jnp.float32(scale if each == name else 0) for each in losses})[0]
        for name in losses
    }
    return losses, gradients, returned


def _derive_on_tensorflow(forward: Any, values: Sequence[Any], scale: Any) -> Any:
    import tensorflow as tf

    def rows(gradient: Any) -> Any:
        """Returns slices summed for each row that is in them, as a step computes them."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        indices, place = tf.unique(gradient.indices)
        return tf.math.unsorted_segment_sum(gradient.values, place, tf.size(indices))

    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(values)
        losses, returned = forward(values)
    by = tf.constant(scale, tf.float32)
    gradients = {
        name: [rows(each) for each in tape.gradient(loss, values, output_gradients=by)]
        for name, loss in losses.items()
    }
    return losses, gradients, returned


def _derive_on_torch(forward: Any, values: Sequence[Any], scale: Any) -> Any:
    import torch

    with torch.enable_grad():
        # Detached copies share memory with the parameters and are leaves, so no parameter gets a
        # `grad`.
        values = [value.detach().requires_grad_() for value in values]
        losses, returned = forward(values)
        gradients: dict[str, Any] = {name: [None] * len(values) for name in losses}
        for name, loss in losses.items():
            if loss.requires_grad:
                by = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
                gradients[name] = torch.autograd.grad(
                    loss, values, by, retain_graph=True, allow_unused=True
                )
    returned = {
        # Within `torch.vmap`, a tensor holds the numbers of all rows.
        name: [torch.func.debug_unwrap(tensor).detach() for tensor in tensors]
        for name, tensors in returned.items()
    }
    return {name: loss.detach() for name, loss in losses.items()}, gradients, returned


_DERIVE = {"jax": _derive_on_jax, "tensorflow": _derive_on_tensorflow, "torch": _derive_on_torch}
"""Compute the losses, their gradients, and what the operations returned."""


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Within it, a framework draws the same numbers each time, and its state stays unchanged."""
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "torch":
            import torch

            stack.enter_context(torch.random.fork_rng())
        elif keras.backend.backend() == "tensorflow":
            _draw_by_keras(stack)
        yield


def _draw_by_keras(stack: contextlib.ExitStack) -> None:
    """Lets `tf.random.normal` and its like draw numbers by Keras, from fixed seeds.

    TensorFlow's own numbers are different in each call, and different in float16.
    """
    import tensorflow as tf

    seeds = itertools.count()

    def drawn_by_keras(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(tf.random, name))

        def drawn(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            shape, first, second, dtype, *_ = given.arguments.values()
            dtype = tf.as_dtype(dtype)
            draw = keras.random.randint if dtype.is_integer else getattr(keras.random, name)
            return draw(shape, first, 1 if second is None else second, dtype.name, next(seeds))

        return drawn

    for name in ("normal", "truncated_normal", "uniform"):
        replace(stack, tf.random, name, drawn_by_keras(name))


def _traced() -> Any:
    """Identifies the function that is being traced, out of which no tensor gets."""
    if keras.backend.backend() == "jax":
        import jax
        import jax.extend

        # The random state is about to advance.
        core = jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core
        return core.get_opaque_trace_state(convention="flax")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.executing_eagerly()
    return None


# --- What operations return -----------------------------------------------------------------------

_MODULES = ("image", "linalg", "math", "nn", "numpy")
_LOOPS = (
    *("associative_scan", "cond", "fori_loop", "map", "scan", "switch", "vectorized_map"),
    "while_loop",
)
"""Each is one operation, since no tensor gets out of a compiled loop or branch."""


def _functions() -> list[tuple[Any, str]]:
    """The functions of the backend that compute numbers: a module and a name each."""
    found = [(backend_functions, "rnn"), *((backend_functions.core, each) for each in _LOOPS)]
    for module in (getattr(backend_functions, each) for each in _MODULES):
        found += [
            (module, name)
            for name, function in vars(module).items()
            if inspect.isfunction(function) and function.__module__ == module.__name__
        ]
    return found


@contextlib.contextmanager
def _watched(model: Any, watch: bool) -> Iterator[dict[str, list[Any]]]:
    """Within it, what layers and the functions of the backend return is kept, by name.

    A function that such a function calls is not listed separately.
    """
    if not watch:
        yield {}
        return
    # JAX would return the keys of a dictionary sorted.
    returned: OrderedDict[str, list[Any]] = OrderedDict()
    counts: Counter[str] = Counter()
    # A function may return a tensor that another returned. Keep all of them, so that no identity is
    # reused.
    seen: dict[int, Any] = {}
    outside, is_inside = _traced(), False

    def keep(name: str, results: Any) -> None:
        if is_inside or _traced() != outside:
            return
        tensors = {
            id(each): each
            for each in keras.tree.flatten(results)
            if keras.ops.is_tensor(each)
            and "float" in str(each.dtype)
            and len(each.shape)
            and 0 not in each.shape
            and id(each) not in seen
        }
        if tensors:
            seen.update(tensors)
            returned[numbered(name, counts)] = list(tensors.values())

    def kept(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return function(*args, **kwargs)
            is_inside = True
            try:
                results = function(*args, **kwargs)
            finally:
                is_inside = False
            keep(f"{_inside(current_path(), model)} ({name})", results)
            return results

        return called

    call = keras.Layer.__call__

    def layer_called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        results = call(layer, *args, **kwargs)
        keep(f"{_inside(str(layer.path or layer.name), model)} (output)", results)
        return results

    with contextlib.ExitStack() as stack:
        replace(stack, keras.Layer, "__call__", layer_called)
        for module, name in _functions():
            replace(stack, module, name, kept(getattr(module, name), name))
        yield returned


def _range(tensors: Sequence[Any]) -> tuple[Any, Any]:
    """The largest finite magnitude in tensors, and whether every element is finite."""
    ops = keras.ops
    flat = ops.concatenate([ops.reshape(ops.cast(each, "float32"), (-1,)) for each in tensors])
    finite = ops.isfinite(flat)
    return ops.max(ops.where(finite, ops.abs(flat), 0.0)), ops.all(finite)


# --- Precision ------------------------------------------------------------------------------------


def _cast_to_float16(model: Any) -> list[Any]:
    """Returns the layers that compute in float16 only once the model trains in it.

    The list is empty if a layer does so already; otherwise it has the layers that did not ask for a
    dtype.
    """
    if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
        return []

    def asks(layer: Any) -> bool:
        created = getattr(getattr(layer, "_auto_config", None), "config", None)
        if created is None:
            # An argument was an object. Layers created without a dtype share the policy object.
            return layer._dtype_policy is not model._dtype_policy
        return created.get("dtype") is not None

    def visit(layer: Any, everything: bool) -> Iterator[Any]:
        parts = list(layer._flatten_layers(include_self=False, recursive=False))
        is_of_keras = type(layer).__module__.partition(".")[0] == "keras"
        if layer is model or (parts and (hasattr(layer, "train_step") or not is_of_keras)):
            yield layer
            for part in parts:
                yield from visit(part, everything)
        elif everything or not asks(layer):
            # A layer of Keras passes its dtype to its sublayers.
            yield from layer._flatten_layers()

    found = list(visit(model, False))
    innermost = [each for each in found if not list(each._flatten_layers(include_self=False))]
    # In a loaded model, each layer stores its dtype.
    if not any(layer.weights for layer in innermost):
        found = list(visit(model, True))
    return [
        each for each in found if each.compute_dtype in _WIDER and each.quantization_mode is None
    ]


def _value(variable: Any, half: bool) -> Any:
    """The value of a variable; in float32 at least, except for a pass in float16."""
    value = keras.ops.convert_to_tensor(variable.value)
    return value if half or _dtype(value) not in _NARROW else keras.ops.cast(value, "float32")


@contextlib.contextmanager
def _drawn_in_float32() -> Iterator[None]:
    """Within it, all random numbers of Keras are drawn in float32, and cast.

    Frameworks draw other numbers in float16 than in float32 from the same seed: dropout would drop
    other elements than in the reference, and the two could not be compared.
    """

    def wide(dtype: str) -> str:
        return "float32" if dtype in _NARROW else dtype

    def in_float32(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            dtype = keras.backend.standardize_dtype(dtype)
            return keras.ops.cast(draw(*args, dtype=wide(dtype), **kwargs), dtype)

        return drawn

    drop = random_functions.dropout

    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = _dtype(inputs)
        dropped = drop(keras.ops.cast(inputs, wide(dtype)), *args, **kwargs)
        return keras.ops.cast(dropped, dtype)

    with contextlib.ExitStack() as stack:
        for name in ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial"):
            replace(stack, random_functions, name, in_float32(getattr(random_functions, name)))
        replace(stack, random_functions, "dropout", dropout)
        yield


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """After it, each layer has the attributes that it had before, past the tracking of Keras."""
    before = [(vars(layer), dict(vars(layer))) for layer in model._flatten_layers()]
    try:
        yield
    finally:
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)


# --- Checks ---------------------------------------------------------------------------------------


def _check_arguments(model: Any, loss_fn: Any) -> None:
    """Checks that the loss is known, and that there are variables to train."""
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` must be a function of the model and a batch. Received: "
            f"{loss_fn!r} of type {type(loss_fn).__name__}. A batch is (x, y, sample_weight); "
            "return the loss."
        )
    train_step = getattr(model.train_step, "__func__", None)
    if loss_fn is None and train_step is not keras.Model.train_step:
        raise ArgumentError(_lines_to_write(model))
    if loss_fn is None and not model.compiled:
        raise ArgumentError(
            f"The model {model.name!r} is not compiled, so its loss is unknown. Call "
            "model.compile(optimizer, loss) first, or pass loss_fn=."
        )
    if not model.trainable_variables:
        raise ArgumentError(
            f"The model {model.name!r} has no trainable variables. If it is not built yet, call it "
            "on a batch, or give it an Input, first."
        )


def _lines_to_write(model: Any) -> str:
    """The message with the function that a model with its own `train_step` needs."""
    owner = type(model).__name__
    known = bool(getattr(model, "loss", None))
    loss = "model.compute_loss(x, y, y_pred, sample_weight)" if known else "..."
    return (
        f"{owner} has a train_step of its own, so its loss is not known. Write the unscaled "
        f"loss of {owner}.train_step as a function, and pass it:\n\n"
        "    def loss_fn(model, batch):\n"
        "        x, y, sample_weight = batch\n"
        "        y_pred = model(x, training=True)\n"
        f"        loss = {loss}\n"
        "        return loss\n\n"
        "    diagnose(model, ..., loss_fn=loss_fn)\n\n"
        "If several optimizers train, return a dictionary of losses, and pass the variables of "
        'each: parameters={"name of the loss": [...], ...}.'
    )


def _inside(path: str, model: Any) -> str:
    """The path of a layer within the model; "loss" outside of it."""
    return path.removeprefix(f"{model.name}/") or "loss"


def _dtype(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _on_host(tensor: Any) -> Any:
    """A tensor as a NumPy array of float32."""
    return np.asarray(keras.ops.convert_to_numpy(tensor)).astype(np.float32)

"""Gradients of a Keras 3 model in float32 and in float16, and the ranges of its operations.

A pass runs in a `keras.StatelessScope`, which takes what would be assigned to any variable:
statistics of normalizations, states of random seeds, metrics. In the reference all layers compute
in float32, whatever their dtype policy; in float16 those that did not ask for a dtype compute as
`mixed_float16` makes them. Every attribute of every layer is put back after each pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lossscale.common.monkeypatch import replace
from lossscale.diagnosis.batches import NO_NUMBERS, leaves
from lossscale.diagnosis.measurement import (
    TARGETS,
    LossGradients,
    OutputRange,
    check_owners,
    checked_losses,
    numbered,
)
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError
from lossscale.keras import backends
from lossscale.keras.private_names import backend_functions, current_path, random_functions
from lossscale.optimizer import LossScaleOptimizer

_NARROW = ("float16", "bfloat16")
_WIDER = ("float32", "float64", "bfloat16")


class KerasGradientFunction:
    """Computes passes of a Keras 3 model; see `lossscale.diagnosis.measurement.GradientFunction`.

    Args:
        model: A `keras.Model` that has its variables.
        loss_fn, parameters: As for `lossscale.diagnosis.diagnose`.

    Attributes:
        setting: What it computes with, in words.

    Raises:
        ArgumentError: If its loss is not known, or it has no variables.
        ArgumentTypeError: If `loss_fn` is not a function.
    """

    def __init__(self, model: Any, loss_fn: Any = None, parameters: Any = None) -> None:
        _check_model(model, loss_fn)
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
        self._computations: dict[tuple[bool, bool], tuple[Any, list[str], list[str]]] = {}

    def scale_in_use(self) -> float | None:
        """Returns the loss scale of the model's optimizer; None if it has none."""
        optimizer = getattr(self._model, "optimizer", None)
        found = getattr(optimizer, "loss_scale_factor", None)
        if isinstance(optimizer, LossScaleOptimizer):
            found = optimizer._current_scale()
        elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            dynamic = getattr(optimizer, "dynamic_scale", None)
            found = optimizer.initial_scale if dynamic is None else dynamic
        return None if found is None else float(keras.ops.convert_to_numpy(found))

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns a pass for each loss."""
        batch = (*batch, None, None)[:3]
        _check_batch(batch, self._model, self._loss_fn)
        on_jax = keras.backend.backend() == "jax"
        # Compiling a second function would cost more than always recording ranges.
        key = half, watch or (half and on_jax)
        if key not in self._computations:
            losses: list[str] = []
            operations: list[str] = []
            compute = functools.partial(self._compute, *key, losses, operations)
            function = _compiled_by_jax(compute) if on_jax else compute
            self._computations[key] = function, losses, operations
        compute, losses, operations = self._computations[key]
        with _as_it_was(self._model), _drawn_in_float32(), _host_random_numbers():
            self._set_precision(half)
            values = [_value(variable, half) for variable in self._variables]
            found, ranges = compute(values, batch, np.float32(scale))
        check_owners(self._owned, losses)
        outputs = {
            name: OutputRange(float(largest), bool(finite))
            for name, (largest, finite) in zip(operations, ranges, strict=True)
        }
        passes = {}
        for name, (loss, gradients) in zip(losses, found, strict=True):
            owned = self._owned.get(name)
            chosen = {
                key: None if gradient is None else _on_host(gradient)
                for key, variable, gradient in zip(
                    self._names, self._trained, gradients, strict=True
                )
                if owned is None or id(variable) in owned
            }
            if all(gradient is None for gradient in chosen.values()):
                raise ArgumentError(
                    "The loss depends on none of the model's trainable variables. Compute it with "
                    "the model that `loss_fn` receives."
                )
            passes[name] = LossGradients(chosen, float(_on_host(loss)), outputs)
        return passes

    def _compute(
        self,
        half: bool,
        watch: bool,
        names: list[str],
        operations: list[str],
        values: Sequence[Any],
        batch: Any,
        scale: Any,
    ) -> Any:
        """Returns each loss with its gradients, and the range of each operation.

        It writes the names of both into two lists, since a compiled function returns only tensors.
        """
        count = len(self._trained)

        def forward(trained: Sequence[Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
            watcher = _Watcher(self._model) if watch else None
            returned = self._forward([*trained, *values[count:]], batch, watcher)
            losses = checked_losses(returned, keras.ops.is_tensor)
            wide = {
                name: keras.ops.reshape(keras.ops.cast(loss, "float32"), ())
                for name, loss in losses.items()
            }
            return wide, watcher.returned if watcher is not None else {}

        losses, gradients, returned = _derive()(forward, values[:count], scale)
        shown = {
            name: [each for each in tensors if not half or _dtype(each) == "float16"]
            for name, tensors in returned.items()
        }
        names[:] = losses
        operations[:] = [name for name, tensors in shown.items() if tensors]
        found = [(loss, gradients[name]) for name, loss in losses.items()]
        return found, [_range(shown[name]) for name in operations]

    def _forward(self, values: Sequence[Any], batch: Any, watcher: _Watcher | None) -> Any:
        """Returns what the loss function returns."""
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        for variable, value in zip(self._variables, values, strict=True):
            # Assigned after construction, which would round the value to the variable's dtype.
            scope.add_update((variable, value))
        x, y, sample_weight = keras.tree.map_structure(
            lambda array: None if array is None else keras.ops.convert_to_tensor(array), batch
        )
        with scope, _same_random_numbers(), watcher or contextlib.nullcontext():
            if self._loss_fn is not None:
                return self._loss_fn(self._model, (x, y, sample_weight))
            model = self._model
            training = {"training": True} if model._call_has_training_arg else {}
            y_pred = model(x, **training)
            if watcher is not None:
                watcher.keep_targets(y, y_pred)
            if model._compile_loss is None and not _has_own_loss(model) and not model.losses:
                raise ArgumentError(
                    f"The model {model.name!r} was compiled without a loss. Call "
                    "model.compile(optimizer, loss), or pass loss_fn=."
                )
            with _naming_targets(y, y_pred):
                return model._compute_loss(x, y, y_pred, sample_weight, training=True)

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


def _derive() -> Callable[..., Any]:
    """Returns what computes losses, their gradients, and what the operations returned."""
    derive = {
        "jax": _derive_on_jax,
        "tensorflow": _derive_on_tensorflow,
        "torch": _derive_on_torch,
    }
    return derive[keras.backend.backend()]


def _derive_on_jax(forward: Any, values: Sequence[Any], scale: Any) -> Any:
    import jax
    import jax.numpy as jnp

    names: list[str] = []

    def compute(values: Any) -> Any:
        losses, returned = forward(values)
        names[:] = returned
        return losses, list(returned.values())

    losses, pull, returned = jax.vjp(compute, list(values), has_aux=True)
    gradients = {
        name: pull({each: jnp.float32(scale if each == name else 0) for each in losses})[0]
        for name in losses
    }
    return losses, gradients, dict(zip(names, returned, strict=True))


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
        gradients: dict[str, Any] = {}
        for name, loss in losses.items():
            gradients[name] = [None] * len(values)
            if loss.requires_grad:
                by = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
                gradients[name] = torch.autograd.grad(
                    loss, values, by, retain_graph=True, allow_unused=True
                )
    returned = {name: [t.detach() for t in tensors] for name, tensors in returned.items()}
    return {name: loss.detach() for name, loss in losses.items()}, gradients, returned


def _compiled_by_jax(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function, which rounds to float16 wherever it says so."""
    import jax

    compiled: Callable[..., Any] = jax.jit(
        compute, compiler_options={"xla_allow_excess_precision": False}
    )
    return compiled


def _same_random_numbers() -> contextlib.AbstractContextManager[Any]:
    """Within it the framework draws what it draws each time, and its state stays as it was."""
    if keras.backend.backend() == "torch":
        import torch

        fork: contextlib.AbstractContextManager[Any] = torch.random.fork_rng()
        return fork
    if keras.backend.backend() == "tensorflow":
        return _repeatable_tensorflow()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _repeatable_tensorflow() -> Iterator[None]:
    """Within it `tf.random.normal` and its like draw the numbers that Keras draws from fixed seeds.

    By themselves they draw others each time, and others in float16 than in float32.
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

    def dropout(x: Any, rate: Any, noise_shape: Any = None, **_: Any) -> Any:
        return keras.random.dropout(x, rate, noise_shape, next(seeds))

    with contextlib.ExitStack() as stack:
        for name in ("normal", "truncated_normal", "uniform"):
            replace(stack, tf.random, name, drawn_by_keras(name))
        replace(stack, tf.nn, "dropout", dropout)
        yield


def _traced() -> Any:
    """What stands for the function that is being traced, out of which no tensor gets."""
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


def _plain(tensor: Any) -> Any:
    """A tensor that outlives the function that is traced; of `torch.vmap` all of its rows."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.func.debug_unwrap(tensor)
    return tensor


# --- What operations return -----------------------------------------------------------------------

_MODULES = ("numpy", "nn", "math", "linalg", "image")
_LOOPS = ("rnn", "lstm", "gru", "bidirectional_lstm", "bidirectional_gru")
_LOOPS_OF_CORE = (
    *("associative_scan", "cond", "fori_loop", "map", "scan", "switch"),
    *("vectorized_map", "while_loop"),
)
"""Out of the body of a loop or a branch no tensor gets: it is one operation."""


class _Watcher(contextlib.ExitStack):
    """Within it the results of the functions of the backend and of layers are kept.

    Attributes:
        returned: Name of each operation to the tensors that it returned.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.returned: dict[str, list[Any]] = {}
        self._model, self._outside = model, _traced()
        # An operation may return a tensor that another returned. Keep all of them, so that no
        # identity is reused.
        self._seen: dict[int, Any] = {}
        self._counts: Counter[str] = Counter()
        self._is_inside = False

    def __enter__(self) -> Any:
        call = keras.Layer.__call__

        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            returned = call(layer, *args, **kwargs)
            self._keep(f"{self._inside(str(layer.path or layer.name))} (output)", returned)
            return returned

        replace(self, keras.Layer, "__call__", called)
        backend = backend_functions
        for module in (getattr(backend, name) for name in _MODULES):
            for name, function in list(vars(module).items()):
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    replace(self, module, name, self._watched(function, name))
        for module, names in ((backend, _LOOPS), (backend.core, _LOOPS_OF_CORE)):
            for name in names:
                if hasattr(module, name):
                    replace(self, module, name, self._watched(getattr(module, name), name))
        return super().__enter__()

    def keep_targets(self, y: Any, y_pred: Any) -> None:
        """Keeps targets in the dtype of the outputs that they are compared with."""
        for target, output in zip(*map(keras.tree.flatten, (y, y_pred)), strict=False):
            # Others, such as class numbers, are not values that an output should reach.
            if target is not None and math.prod(target.shape) == math.prod(output.shape):
                self._keep(TARGETS, keras.ops.cast(target, output.dtype))

    def _inside(self, path: str) -> str:
        return _inside(path, self._model)

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Returns a function whose results are kept; what it calls is a part of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            try:
                returned = function(*args, **kwargs)
            finally:
                self._is_inside = False
            self._keep(f"{self._inside(current_path())} ({name})", returned)
            return returned

        return watched

    def _keep(self, name: str, returned: Any) -> None:
        if self._is_inside or _traced() != self._outside:
            return
        tensors = {
            id(each): each
            for each in keras.tree.flatten(returned)
            if keras.ops.is_tensor(each)
            and "float" in str(each.dtype)
            and len(each.shape)
            and 0 not in each.shape
            and id(each) not in self._seen
        }
        if tensors:
            self._seen |= tensors
            name = numbered(name, self._counts)
            self.returned[name] = [_plain(each) for each in tensors.values()]


def _range(tensors: Sequence[Any]) -> tuple[Any, Any]:
    """The largest finite magnitude in tensors, and whether every element is finite."""
    ops = keras.ops
    wide = [ops.cast(each, "float32") for each in tensors]
    finite = [ops.isfinite(each) for each in wide]
    largest = [
        ops.max(ops.where(is_finite, ops.abs(each), 0.0))
        for each, is_finite in zip(wide, finite, strict=True)
    ]
    return ops.max(ops.stack(largest)), ops.all(ops.stack([ops.all(each) for each in finite]))


# --- Precision ------------------------------------------------------------------------------------


def _cast_to_float16(model: Any) -> list[Any]:
    """Returns the layers that compute in float16 only once the model trains in it.

    None if one of them does so already; otherwise those that did not ask for a dtype.
    """
    layers = list(model._flatten_layers())
    if any(layer.compute_dtype == "float16" for layer in layers):
        return []
    whole: list[Any] = []
    parts: list[Any] = []

    def visit(layer: Any) -> None:
        own = list(layer._flatten_layers(include_self=False, recursive=False))
        is_of_keras = type(layer).__module__.partition(".")[0] == "keras"
        if layer is model or (own and (hasattr(layer, "train_step") or not is_of_keras)):
            whole.append(layer)
            for each in own:
                visit(each)
        else:
            parts.append(layer)

    visit(model)
    policy = keras.config.dtype_policy()
    # Layers created without a dtype share the policy object, unless another was set in between.
    is_shared = any(layer._dtype_policy is policy for layer in layers)

    def asks(layer: Any) -> bool:
        """Whether a layer was made with a dtype of its own."""
        config = getattr(getattr(layer, "_auto_config", None), "config", None)
        if config is None:
            return is_shared and layer._dtype_policy is not policy
        return config.get("dtype") is not None

    chosen = [layer for layer in parts if not asks(layer)]
    # In a loaded model, each layer stores its dtype.
    if not any(layer.weights for layer in chosen):
        chosen = parts
    # A built-in layer passes its dtype to its sublayers.
    inside = [each for layer in chosen for each in layer._flatten_layers()]
    found = {id(layer): layer for layer in (*whole, *inside)}.values()
    return [
        each for each in found if each.compute_dtype in _WIDER and each.quantization_mode is None
    ]


def _value(variable: Any, half: bool) -> Any:
    """The value of a variable; in float32 at least, but for a pass in float16."""
    value = keras.ops.convert_to_tensor(variable.value)
    return value if half or _dtype(value) not in _NARROW else keras.ops.cast(value, "float32")


@contextlib.contextmanager
def _drawn_in_float32() -> Iterator[None]:
    """Within it all random numbers of Keras are drawn in float32, and cast.

    Frameworks draw float16 numbers otherwise than float32 ones, from the same seed: dropout would
    hide other elements in float16 than in its reference, and the two could not be compared.
    """

    def sampler(draw: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(draw)

        def drawn(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            dtype = given.arguments.get("dtype")
            if dtype is None or keras.backend.standardize_dtype(dtype) not in _NARROW:
                return draw(*args, **kwargs)
            given.arguments["dtype"] = "float32"
            return keras.ops.cast(draw(*given.args, **given.kwargs), dtype)

        return drawn

    drop = random_functions.dropout

    def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        if _dtype(inputs) not in _NARROW:
            return drop(inputs, rate, noise_shape, seed)
        kept = drop(keras.ops.ones_like(inputs, dtype="float32"), rate, noise_shape, seed)
        # Dropout turns an infinity into 0, not NaN.
        zeros = keras.ops.zeros_like(inputs)
        return keras.ops.where(kept != 0, inputs * keras.ops.cast(kept, inputs.dtype), zeros)

    with contextlib.ExitStack() as stack:
        for name in ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial"):
            replace(stack, random_functions, name, sampler(getattr(random_functions, name)))
        replace(stack, random_functions, "dropout", dropout)
        yield


# --- As it was ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """After it each layer has the attributes that it had before, past the tracking of Keras."""
    before = [(vars(layer), dict(vars(layer))) for layer in model._flatten_layers()]
    try:
        yield
    finally:
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)


@contextlib.contextmanager
def _host_random_numbers() -> Iterator[None]:
    """After it Python and NumPy draw the numbers that they would have drawn before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


# --- Checks ---------------------------------------------------------------------------------------


def _check_model(model: Any, loss_fn: Any) -> None:
    """Checks that passes of a model can be computed."""
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` must be a function of the model and a batch (x, y, sample_weight) that "
            f"returns the loss. Received: {loss_fn!r} of type {type(loss_fn).__name__}."
        )
    own_step = type(model).train_step is not keras.Model.train_step
    if loss_fn is None and (own_step or "train_step" in vars(model)):
        raise ArgumentError(_lines_to_write(model))
    if loss_fn is None and not model.compiled:
        raise ArgumentError(
            f"The model {model.name!r} is not compiled, so its loss is unknown. Call "
            "model.compile(optimizer, loss) first, or pass loss_fn=."
        )
    is_built = model.built or (loss_fn is not None and bool(model.variables))
    if not is_built or not model.trainable_variables:
        yet = " yet. Call it on a batch, or give it an Input, first."
        raise ArgumentError(
            f"The model {model.name!r} has no trainable variables{'.' if is_built else yet}"
        )


def _lines_to_write(model: Any) -> str:
    """The message with the function that a model with a `train_step` of its own needs."""
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


def _check_batch(batch: Any, model: Any, loss_fn: Any) -> None:
    """Checks that a model can be given a batch; the message names the argument."""
    x, y, _ = batch
    # The user's function checks its own data.
    inputs = list(getattr(model, "inputs", None) or []) if loss_fn is None else []
    texts = any("string" in str(each.dtype) for each in inputs)
    for name, value in zip(("x", "y", "sample_weight"), batch, strict=True):
        for array in leaves(value):
            kind = getattr(getattr(array, "dtype", None), "kind", "f")
            if kind in NO_NUMBERS and not (name == "x" and texts):
                raise ArgumentError(
                    f"`{name}` must hold numbers. Received: an array of dtype {array.dtype}."
                )
    loss = None if loss_fn is not None or _has_own_loss(model) else model._compile_loss
    if y is None and loss is not None and any(keras.tree.flatten(loss._user_loss)):
        raise ArgumentError(
            "`y` is missing, and the loss of this model needs targets. Pass them as `y`, or in "
            "batches (x, y)."
        )
    if isinstance(x, Mapping):
        # The model checks other keys.
        arrays: list[Any] = [x.get(each.name) for each in inputs]
    else:
        arrays = list(leaves(x))
        if inputs and len(arrays) != len(inputs):
            names = ", ".join(repr(each.name) for each in inputs)
            raise ArgumentError(
                f"`x` must have one array for each input of the model: {names}. "
                f"Received: {len(arrays)}."
            )
    for each, array in zip(inputs, arrays, strict=False):
        if hasattr(array, "shape") and not _fits(array.shape, each.shape):
            shape = ", ".join(str(size) for size in ("rows", *each.shape[1:]))
            raise ArgumentError(
                f"`x` must have the shape ({shape}) for the input {each.name!r}. "
                f"Received: {tuple(array.shape)}."
            )


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether Keras takes an array for an input; the first number of both is that of the rows."""
    found, wanted = tuple(shape)[1:], tuple(expected)[1:]
    # Keras adds or removes a last dimension of 1.
    shapes = [wanted, (*wanted, 1), *([wanted[:-1]] if wanted[-1:] == (1,) else [])]
    return any(
        len(found) == len(each)
        and all(want in (None, got) for want, got in zip(each, found, strict=True))
        for each in shapes
    )


@contextlib.contextmanager
def _naming_targets(y: Any, y_pred: Any) -> Iterator[None]:
    """Reports targets that do not fit as the cause of an error."""
    try:
        yield
    except LossScaleError:
        raise
    # Each backend and loss raises its own exceptions for shapes that do not fit.
    except Exception as error:
        y, y_pred = (
            ", ".join(str(tuple(leaf.shape)) for leaf in leaves(each)) or "nothing"
            for each in (y, y_pred)
        )
        raise ArgumentError(
            f"`y` does not match the outputs of the model or its loss. Received: shape {y}, for "
            f"outputs of shape {y_pred}."
        ) from error


def _has_own_loss(model: Any) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss


def _inside(path: str, model: Any) -> str:
    """The path of a layer within the model; of the loss outside of it."""
    return path.removeprefix(f"{model.name}/") or "loss"


def _dtype(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _on_host(tensor: Any) -> Any:
    """A tensor as a NumPy array of float32."""
    return np.asarray(keras.ops.convert_to_numpy(tensor)).astype(np.float32)

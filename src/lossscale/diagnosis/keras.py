"""Gradients of a Keras 3 model in float32 and in float16.

A pass runs in a `keras.StatelessScope`, which takes every assignment to a variable: statistics of
normalizations, states of random seeds, metrics. In the reference, all layers compute in float32,
whatever their dtype policy; in float16, layers that did not ask for a dtype compute as under
`mixed_float16`. Every attribute of every layer is restored after each pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
from numpy.typing import NDArray

from lossscale.checks import checked_count, checked_parameters
from lossscale.common.overflow_tracker import unique_names
from lossscale.common.private_names import private_name
from lossscale.common.replaced_names import replace
from lossscale.diagnosis.measurement import Pass, checked_loss, explained_in_float16, known_size
from lossscale.errors import ArgumentError
from lossscale.explain.origins import Watched, explain_pass, not_compared
from lossscale.explain.text import Cause, Explanation
from lossscale.framework_types import (
    Array,
    Layer,
    Library,
    Model,
    Scalar,
    Structure,
    Tensor,
    Variable,
)
from lossscale.keras import backends

_random_functions: Library = private_name(
    "keras.src.backend", "random", "let layers draw the same numbers in float16 and in float32"
)
_NARROW = ("float16", "bfloat16")
_WIDER = ("float32", "float64", "bfloat16")

LossFn: TypeAlias = Callable[[Model, Structure], Tensor]
"""A loss of a model and a batch."""
Scope: TypeAlias = contextlib.AbstractContextManager[object]
"""A scope of names for operations."""
Forward: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, list[Tensor]]]
"""Computes the loss of the trained variables' values, and for each target whether it fits."""
Computed: TypeAlias = tuple[Tensor, Sequence[Tensor | None], list[Tensor]]
"""The loss, its gradients, and for each target whether its output's dtype holds it."""


class KerasGradientFunction:
    """The passes of a Keras 3 model; see `lossscale.diagnosis.measurement.GradientFunction`.

    Args:
        model: A `keras.Model` that has its variables.
        loss_fn, parameters: As for `lossscale.diagnosis.diagnose`.

    Attributes:
        setting: The format that the model computes in, in words.

    Raises:
        ArgumentError: If its loss is not known, or it has no variables.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFn | None = None,
        parameters: Iterable[Variable] | None = None,
    ) -> None:
        _check_arguments(model, loss_fn)
        # Refuses unsupported backends.
        backends.load()
        self._model, self._loss_fn = model, loss_fn
        self._trained = checked_parameters(parameters, model.trainable_variables)
        trained = set(map(id, self._trained))
        self._variables = [*self._trained, *(v for v in model.variables if id(v) not in trained)]
        self._names = unique_names([self._inside(each.path) for each in self._trained])
        self._casts = _cast_to_float16(model)
        how = "mixed_float16" if self._casts else "its own float16"
        self.setting = f"Keras on {keras.backend.backend()}, {how}"
        self._computations: dict[bool, Callable[..., Computed]] = {}

    def __call__(self, batch: Structure, scale: float, half: bool) -> Pass:
        """Computes a pass."""
        if half not in self._computations:
            # Another object in each precision, or jit would take the trace of the other one.
            compute: Callable[..., Computed] = functools.partial(self._compute)
            if keras.backend.backend() == "jax":
                import jax

                # It must round to float16 wherever the model casts to it.
                exactly = {"xla_allow_excess_precision": False}
                compute = jax.jit(compute, compiler_options=exactly)
            self._computations[half] = compute
        with self._in_precision(half) as values:
            given = values, _own_arrays(batch)
            loss, gradients, fits = self._computations[half](given, np.float32(scale))
        found = {
            name: None if gradient is None else _on_host(gradient)
            for name, gradient in zip(self._names, gradients, strict=True)
        }
        return Pass(float(_on_host(loss)), found, all(map(_on_host, fits)))

    # JAX computes constants with NumPy, which warns of an overflow.
    @np.errstate(all="ignore")
    def explain(self, batch: Structure, scale: float, half: bool = True) -> Explanation:
        """Explains why a pass is not finite."""
        batch = _mapped(keras.ops.convert_to_tensor, Batch(*batch))
        watch = functools.cache(functools.partial(self._watch, batch))

        def explained(half: bool) -> Explanation:
            if keras.backend.backend() == "torch":
                return self._on_torch(batch, scale, half)
            return explain_pass(lambda s: watch(half)(s), scale, lambda s: watch(False)(s))

        return explained_in_float16(explained) if half else explained(False)

    def _watch(self, batch: Batch, half: bool) -> Callable[[float], Watched]:
        make: Callable[..., Callable[[float], Watched]]
        scope: Callable[[str], Scope]
        if keras.backend.backend() == "jax":
            import jax

            from lossscale.explain.jax import JaxprWatch

            make, scope = JaxprWatch, jax.named_scope
        else:
            import tensorflow as tf

            from lossscale.explain.tensorflow import GraphWatch

            make, scope = GraphWatch, tf.name_scope
        paths: list[str] = []

        def numbered(path: str) -> Scope:
            paths.append(path)
            return scope(f"layer>{len(paths) - 1}>")

        def layer_of(path: str) -> str:
            numbers = re.findall(r"layer>(\d+)>", path)
            return paths[int(numbers[-1])] if numbers else path

        with self._in_precision(half) as values, self._layers_within(numbered):
            return make(self._compute, (values, batch), self._names_of(batch), layer_of)

    @contextlib.contextmanager
    def _layers_within(self, scope: Callable[[str], Scope]) -> Iterator[None]:
        """Within it, each call of a layer is within a scope, for its path in the model."""
        call = keras.Layer.__call__

        def called(layer: Layer, *args: Any, **kwargs: Any) -> Structure:
            with scope(self._inside(str(layer.path or layer.name))):
                return call(layer, *args, **kwargs)

        with contextlib.ExitStack() as stack:
            replace(stack, keras.Layer, "__call__", called)
            yield

    def _on_torch(self, batch: Batch, scale: float, half: bool) -> Explanation:
        import torch

        from lossscale.explain.torch import examined
        from lossscale.explain.torch_watch import Watch

        count, given = len(self._trained), _own_arrays(batch)

        def in_float32(scale: float) -> Watched:
            is_finite = self.explain(given, scale, False).cause is Cause.UNKNOWN
            return Watched(None, None) if is_finite else not_compared(scale)

        batch = _own_arrays(given)
        with self._in_precision(half) as values:
            arrays = [each for each in keras.tree.flatten((values, batch)) if each is not None]
            named = list(zip(self._names_of(batch), arrays, strict=True))
            # It is the layers of Keras that have names, and not the modules of PyTorch.
            watch = Watch(torch.nn.Module())
            for (name, is_weight), value in named:
                watch.mark([(name, value)], is_weight=is_weight)
            with torch.enable_grad(), torch.random.fork_rng(), self._layers_within(watch.inside):
                first = [value.detach().requires_grad_() for value in values[:count]]
                all_values = [*first, *values[count:]]
                wide = in_float32 if half else not_compared
                return examined(
                    watch, lambda: self._forward(all_values, batch)[0], first, scale, wide
                )

    def _names_of(self, batch: Batch) -> list[tuple[str, bool]]:
        """The names of all variables and of the arrays in a batch; whether each is a variable."""
        inputs = [
            (f"{name}/{number}" if number else name, False)
            for name, part in batch._asdict().items()
            for number, each in enumerate(keras.tree.flatten(part))
            if each is not None
        ]
        return [*((self._inside(each.path), True) for each in self._variables), *inputs]

    def _inside(self, path: str) -> str:
        return path.removeprefix(f"{self._model.name}/")

    def _compute(self, arrays: tuple[list[Tensor], Structure], scale: Scalar) -> Computed:
        """Returns what all backends compute for the variables' values and a batch."""
        (values, batch), count = arrays, len(self._trained)

        def forward(trained: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            return self._forward([*trained, *values[count:]], batch)

        return _DERIVE[keras.backend.backend()](forward, values[:count], scale)

    def _forward(self, values: Sequence[Tensor], batch: Structure) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss, in float32, and for each target whether its output's dtype holds it."""
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        for variable, value in zip(self._variables, values, strict=True):
            # Assigned after construction, which would round the value to the variable's dtype.
            scope.add_update((variable, value))
        x, y, sample_weight = _mapped(keras.ops.convert_to_tensor, Batch(*batch))
        with scope:
            fits = []
            if self._loss_fn is not None:
                loss = self._loss_fn(self._model, (x, y, sample_weight))
            else:
                self._check_targets(y)
                training = {"training": True} if self._model._call_has_training_arg else {}
                y_pred = self._model(x, **training)
                for target, output in zip(*map(keras.tree.flatten, (y, y_pred)), strict=False):
                    sizes = {None if target is None else known_size(target), known_size(output)}
                    # Others, such as class numbers, are not values that an output should reach.
                    if target is None or (None not in sizes and len(sizes) > 1):
                        continue
                    is_other = keras.ops.size(target) != keras.ops.size(output)
                    is_finite = keras.ops.isfinite(keras.ops.cast(target, output.dtype))
                    fits.append(keras.ops.logical_or(is_other, keras.ops.all(is_finite)))
                loss = self._model._compute_loss(x, y, y_pred, sample_weight, training=True)
        loss = checked_loss(loss, keras.ops.is_tensor)
        return keras.ops.reshape(keras.ops.cast(loss, "float32"), ()), fits

    def _check_targets(self, y: Structure) -> None:
        is_own = type(self._model).compute_loss is not keras.Model.compute_loss
        losses = getattr(self._model._compile_loss, "_user_loss", None)
        if y is None and not is_own and any(keras.tree.flatten(losses)):
            raise ArgumentError(
                "`y` is missing, and the loss of this model needs targets. Pass them as `y`, or in "
                "batches (x, y)."
            )

    @contextlib.contextmanager
    def _in_precision(self, half: bool) -> Iterator[list[Tensor]]:
        """Lets the model compute in float32 or float16 within it; yields its variables' values."""
        policy = keras.DTypePolicy("mixed_float16" if half else "float32")
        layers = self._casts if half else _in_dtypes(_NARROW, self._model._flatten_layers())
        loss = getattr(self._model, "_compile_loss", None)
        with _as_it_was(self._model), _drawn_in_float32():
            # Past the tracking of Keras.
            for layer in layers:
                layer.__dict__["_dtype_policy"] = policy
            if loss is not None:
                # A fresh copy, which is built on its first call.
                self._model.__dict__["_compile_loss"] = type(loss)(
                    loss._user_loss, loss._user_loss_weights, output_names=loss.output_names
                )
            yield [_value(variable, half) for variable in self._variables]


# --- What differs between backends ----------------------------------------------------------------


def _derive_on_jax(forward: Forward, values: Sequence[Tensor], scale: Scalar) -> Computed:
    import jax
    import jax.numpy as jnp

    loss, pull, fits = jax.vjp(forward, list(values), has_aux=True)
    return loss, pull(jnp.float32(scale))[0], fits


def _derive_on_tensorflow(forward: Forward, values: Sequence[Tensor], scale: Scalar) -> Computed:
    import tensorflow as tf

    def rows(gradient: Tensor | None) -> Tensor | None:
        """Returns slices summed for each row that is in them, as a step computes them."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        indices, place = tf.unique(gradient.indices)
        return tf.math.unsorted_segment_sum(gradient.values, place, tf.size(indices))

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        loss, fits = forward(values)
    gradients = tape.gradient(loss, values, output_gradients=tf.cast(scale, tf.float32))
    return loss, list(map(rows, gradients)), fits


def _derive_on_torch(forward: Forward, values: Sequence[Tensor], scale: Scalar) -> Computed:
    import torch

    # The states of its random numbers stay, so that each pass draws the same ones.
    with torch.enable_grad(), torch.random.fork_rng():
        # Detached copies share memory with the parameters and are leaves, so no parameter gets a
        # `grad`.
        values = [value.detach().requires_grad_() for value in values]
        loss, fits = forward(values)
        gradients: Sequence[Tensor | None] = [None] * len(values)
        if loss.requires_grad:
            by = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
            gradients = torch.autograd.grad(loss, values, by, allow_unused=True)
    return loss.detach(), gradients, fits


_DERIVE = {"jax": _derive_on_jax, "tensorflow": _derive_on_tensorflow, "torch": _derive_on_torch}
"""Compute the loss, its gradients, and what else `forward` returns."""


# --- Precision ------------------------------------------------------------------------------------


def _cast_to_float16(model: Model) -> list[Layer]:
    """Returns the layers that compute in float16 only once the model trains in it.

    The list is empty if a layer does so already; otherwise it has the layers that did not ask for a
    dtype.
    """
    if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
        return []

    def asks(layer: Layer) -> bool:
        created = getattr(getattr(layer, "_auto_config", None), "config", None)
        if created is None:
            # An argument was an object. Layers created without a dtype share the policy object.
            return layer._dtype_policy is not model._dtype_policy
        return created.get("dtype") is not None

    def visit(layer: Layer, everything: bool) -> Iterator[Layer]:
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
    return _in_dtypes(_WIDER, found)


def _in_dtypes(dtypes: tuple[str, ...], layers: Iterable[Layer]) -> list[Layer]:
    """Those layers that compute in one of some dtypes, and are not quantized."""
    return [e for e in layers if e.compute_dtype in dtypes and e.quantization_mode is None]


def _value(variable: Variable, half: bool) -> Tensor:
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

    def in_float32(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*args: Any, dtype: object = None, **kwargs: Any) -> Tensor:
            name = keras.backend.standardize_dtype(dtype)
            return keras.ops.cast(draw(*args, dtype=wide(name), **kwargs), name)

        return drawn

    drop = _random_functions.dropout

    def dropout(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = _dtype(inputs)
        dropped = drop(keras.ops.cast(inputs, wide(dtype)), *args, **kwargs)
        return keras.ops.cast(dropped, dtype)

    with contextlib.ExitStack() as stack:
        for name in ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial"):
            replace(stack, _random_functions, name, in_float32(getattr(_random_functions, name)))
        replace(stack, _random_functions, "dropout", dropout)
        yield


@contextlib.contextmanager
def _as_it_was(model: Model) -> Iterator[None]:
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


def _check_arguments(model: Model, loss_fn: object) -> None:
    """Checks that the loss is known, and that there are variables to train."""
    # That of a guarded model wraps its own.
    train_step = getattr(inspect.unwrap(model.train_step), "__func__", None)
    if loss_fn is None and train_step is not keras.Model.train_step:
        owner = type(model).__name__
        raise ArgumentError(
            f"{owner} has a train_step of its own, so its loss is not known. Pass loss_fn=, a "
            f"function that returns the unscaled loss of {owner}.train_step, such as:\n\n"
            "    def loss_fn(model, batch):\n"
            "        x, y, sample_weight = batch\n"
            "        return ...  # such as model.compute_loss(x, y, model(x), sample_weight)\n"
        )
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


def _dtype(tensor: Tensor) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _on_host(tensor: Tensor) -> NDArray[np.float32]:
    """A tensor as a NumPy array of float32."""
    return np.asarray(keras.ops.convert_to_numpy(tensor)).astype(np.float32)


# --- Batches --------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A batch of one Keras training step: arrays in the structures of the model's inputs."""

    x: Structure
    y: Structure = None
    sample_weight: Structure = None


def batches_of(
    x: Structure, y: Structure, sample_weight: Structure, batch_size: int
) -> Iterable[Batch]:
    """Returns batches of the arguments of `diagnose`, which describes them.

    Returns:
        From arrays, batches of rows that are picked at random without repetition, always the same
        ones. From an iterable, its batches.

    Raises:
        ArgumentError: If there are no rows or their numbers differ, or an iterable comes with `y`.
    """
    checked_count("batch_size", batch_size)
    are_batches = type(x) is list and x and all(type(each) is tuple for each in x)
    if (isinstance(x, (list, tuple, Mapping)) and not are_batches) or hasattr(x, "shape"):
        return _picked(Batch(x, y, sample_weight), batch_size)
    if y is not None or sample_weight is not None:
        raise ArgumentError(
            "If `x` is an iterable of batches, `y` and `sample_weight` must be None. Received: "
            f"`x` of type {type(x).__name__}. Put them into the batches: (x, y, sample_weight)."
        )
    return map(one_batch, x)


def number_of_rows(data: Batch) -> int:
    """Returns the number of rows of the arrays in a batch, which must have the same one."""
    leaves = (leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    lengths = {len(np.atleast_1d(leaf)) for leaf in leaves}
    if len(lengths) != 1 or lengths == {0}:
        raise ArgumentError(
            "`x`, `y` and `sample_weight` must have the same number of rows, at least one. "
            f"Received: {sorted(lengths)} rows."
        )
    return lengths.pop()


def _picked(data: Batch, batch_size: int) -> Iterator[Batch]:
    data = _mapped(np.atleast_1d, data)
    order = np.random.default_rng(0).permutation(number_of_rows(data))
    for start in range(0, max(len(order) - batch_size, 0) + 1, batch_size):
        rows = order[start : start + batch_size]
        yield _mapped(functools.partial(_rows_of, rows), data)


def _rows_of(rows: NDArray[np.int64], array: Array) -> Array:
    return _narrowed(array[rows])


def one_batch(*batch: Structure) -> Batch:
    """Returns a batch, given as one argument or in parts.

    Raises:
        ArgumentError: If it has more than three parts.
    """
    parts = batch if len(batch) > 1 or not isinstance(batch[0], (tuple, list)) else tuple(batch[0])
    if not 1 <= len(parts) <= 3:
        raise ArgumentError(
            "Each batch must be (x,), (x, y) or (x, y, sample_weight). "
            f"Received: {len(parts)} parts."
        )
    return _mapped(lambda leaf: _narrowed(np.asarray(leaf)), Batch(*parts))


def _mapped(function: Callable[[Array], Array], batch: Batch) -> Batch:
    """Applies a function to each array of a batch."""
    mapped: Batch = keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), batch
    )
    return mapped


def _own_arrays(batch: Structure) -> Batch:
    """A batch whose arrays a pass may write to; tensors of PyTorch share memory with NumPy's."""
    own = keras.ops.copy if keras.backend.backend() == "torch" else lambda array: array
    return _mapped(own, Batch(*batch))


def _narrowed(array: Array) -> Array:
    """A float64 array as float32, as `fit` of Keras makes it; other arrays unchanged."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32) if array.dtype == np.float64 else array

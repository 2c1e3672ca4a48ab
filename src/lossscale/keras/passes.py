"""Passes of a Keras 3 model in float32 and in float16, and what its operations return.

Everything runs in a `keras.StatelessScope`, which takes what would be assigned to any variable:
statistics of normalizations, states of random seeds, metrics. For the reference the layers compute
in float32, whatever their dtype policy; for float16 those that did not ask for a dtype compute as
`mixed_float16` makes them. Their policies are put back after each pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from lossscale.common.monkeypatch import replace
from lossscale.diagnosis.passes import MODEL
from lossscale.keras import backends
from lossscale.keras.private_names import backend_functions, current_path, random_functions
from lossscale.keras.slots import numpy_of
from lossscale.keras_common.passes import (
    NARROW,
    Change,
    Derived,
    Forward,
    ModelRun,
    Watcher,
    arguments_of,
    cast_to_float16,
    check_batch,
    computing_in,
    naming_targets,
    replaced,
    without_a_loss,
)
from lossscale.optimizer import LossScaleOptimizer

_MODULES = ("numpy", "nn", "math", "linalg", "image")
_LOOPS = ("rnn", "lstm", "gru", "bidirectional_lstm", "bidirectional_gru")
_LOOPS_OF_CORE = (
    "associative_scan",
    "cond",
    "fori_loop",
    "map",
    "scan",
    "switch",
    "vectorized_map",
    "while_loop",
)
"""Out of the body of a loop or a branch no tensor gets: it is one operation."""


class KerasRun(ModelRun):
    """Passes of a Keras 3 model, on any backend.

    Args:
        model: A `keras.Model` that has its variables.
        loss_fn, parameters: As for `lossscale.diagnosis.diagnose`.
    """

    library, ops = keras, keras.ops

    def __init__(self, model: Any, loss_fn: Any = None, parameters: Any = None) -> None:
        super().__init__(model, loss_fn, parameters)
        trained = {id(variable) for variable in self.variables}
        self._fixed = [variable for variable in model.variables if id(variable) not in trained]
        self._backend = backends.load()
        self.compiles = self._backend.compiles
        casts = cast_to_float16(model, "keras", _asks(model), _is_quantized)
        self._casts = {id(layer) for layer in casts}
        how = "mixed_float16" if casts else "its own float16"
        self.setting = f"Keras on {keras.backend.backend()}, {how}"

    def is_compiled(self, model: Any) -> bool:
        """Whether `compile` was called."""
        return bool(model.compiled)

    def name_of(self, variable: Any) -> str:
        """Returns the path of a variable within the model."""
        return _inside(variable.path, self.model)

    def scale_in_use(self) -> float | None:
        """The loss scale of the model's optimizer; None if it has none."""
        optimizer = getattr(self.model, "optimizer", None)
        if isinstance(optimizer, LossScaleOptimizer):
            return float(keras.ops.convert_to_numpy(optimizer._current_scale()))
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            dynamic = getattr(optimizer, "dynamic_scale", None)
            return float(optimizer.initial_scale if dynamic is None else numpy_of(dynamic))
        factor = getattr(optimizer, "loss_scale_factor", None)
        return None if factor is None else float(factor)

    def check(self, batch: Any) -> None:
        """Checks a batch before it is used."""
        if self.loss_fn is not None:
            return check_batch(batch, [], needs_targets=False)
        model = self.model
        own = type(model).compute_loss is not keras.Model.compute_loss
        loss = model._compile_loss
        needs = loss is not None and not own and any(keras.tree.flatten(loss._user_loss))
        inputs = getattr(model, "inputs", None) or []
        check_batch(batch, inputs, needs_targets=needs)
        return None

    def values(self, wide: bool) -> list[Any]:
        """Returns the values of all variables; if `wide` in float32 at least."""

        def value_of(variable: Any) -> Any:
            value = keras.ops.convert_to_tensor(variable.value)
            is_narrow = keras.backend.standardize_dtype(variable.dtype) in NARROW
            return keras.ops.cast(value, "float32") if wide and is_narrow else value

        return [value_of(variable) for variable in (*self.variables, *self._fixed)]

    def compiled(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same function, compiled where the backend does that."""
        return self._backend.compiled(compute)

    @contextlib.contextmanager
    def running(self, half: bool) -> Iterator[None]:
        """Within it the model computes in float32 or in float16."""
        policy = keras.DTypePolicy("mixed_float16" if half else "float32")

        def wanted(layer: Any) -> dict[str, Any]:
            if half:
                return {"_dtype_policy": policy} if id(layer) in self._casts else {}
            narrow = layer.compute_dtype in NARROW and not _is_quantized(layer)
            return {"_dtype_policy": policy} if narrow else {}

        with (
            drawn_in_float32(),
            computing_in(self.model._flatten_layers(), wanted),
            self._loss_of_its_own(),
        ):
            yield

    def forward(self, values: Sequence[Any], batch: Any, watcher: Watcher | None) -> Any:
        """Returns what the loss function returns."""
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        for variable, value in zip((*self.variables, *self._fixed), values, strict=True):
            # Not through the constructor, which would narrow the value to the variable's dtype.
            scope.add_update((variable, value))
        batch = keras.tree.map_structure(_to_tensor, tuple(batch))
        watching = contextlib.nullcontext() if watcher is None else self._watching(watcher)
        with scope, self._backend.same_random_numbers(), watching:
            return (self.loss_fn or _loss_of_compile)(self.model, batch)

    def new_watcher(self, change: Change) -> Watcher:
        """Returns what keeps the results of operations."""
        return Watcher(
            change, keras.ops.is_tensor, keras.tree.map_structure, self._backend.current_trace
        )

    def derive(self, forward: Forward, values: Any, scale: Any, inside: bool) -> Derived:
        """Computes the losses, and their gradients."""
        return Derived(*self._backend.derive(forward, values, scale, inside))

    def on_host(self, gradient: Any) -> Any:
        """Returns a gradient as a NumPy array of float32."""
        return super().on_host(keras.ops.convert_to_numpy(gradient))

    @contextlib.contextmanager
    def _watching(self, watcher: Watcher) -> Iterator[None]:
        """Within it a watcher sees what functions of the backend and layers return."""
        backend, model = backend_functions, self.model
        call = keras.Layer.__call__

        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            returned = call(layer, *args, **kwargs)
            path = _inside(str(layer.path or layer.name), model)
            return watcher.keep(MODEL if layer is model else f"{path} (output)", returned)

        def path_of() -> str:
            return _inside(current_path(), model)

        places: list[tuple[Any, tuple[str, ...]]] = [
            (module, tuple(name for name, each in vars(module).items() if _is_of(module, each)))
            for module in (getattr(backend, name) for name in _MODULES)
        ]
        places += [(backend, _LOOPS), (backend.core, _LOOPS_OF_CORE)]
        with contextlib.ExitStack() as stack:
            replace(stack, keras.Layer, "__call__", called)
            for module, names in places:
                for name in names:
                    if hasattr(module, name):
                        watched = watcher.operation(getattr(module, name), path_of, name)
                        replace(stack, module, name, watched)
            yield

    @contextlib.contextmanager
    def _loss_of_its_own(self) -> Iterator[None]:
        """Within it the model has a new copy of its loss, which is built when it is called."""
        loss = getattr(self.model, "_compile_loss", None)
        if loss is None:
            yield
            return
        copy = type(loss)(loss._user_loss, loss._user_loss_weights, output_names=loss.output_names)
        with replaced(self.model, "_compile_loss", copy):
            yield


new_run = KerasRun
"""Returns what computes passes of a model as it is when it is called."""


def _loss_of_compile(model: Any, batch: Any) -> Any:
    x, y, sample_weight = batch
    training = {"training": True} if model._call_has_training_arg else {}
    y_pred = model(x, **training)
    own = type(model).compute_loss is not keras.Model.compute_loss
    if model._compile_loss is None and not own and not model.losses:
        raise without_a_loss(model)
    with naming_targets(y, y_pred):
        return model._compute_loss(x, y, y_pred, sample_weight, training=True)


def _asks(model: Any) -> Callable[[Any], bool]:
    """Returns what says whether a layer of a model was made with a dtype of its own."""
    policy = keras.config.dtype_policy()
    # Layers that were made without a dtype share the object, unless another was set since then.
    is_shared = any(layer._dtype_policy is policy for layer in model._flatten_layers())

    def asks(layer: Any) -> bool:
        arguments = arguments_of(layer)
        if arguments is None:
            return is_shared and layer._dtype_policy is not policy
        return arguments.get("dtype") is not None

    return asks


def _is_of(module: Any, function: Any) -> bool:
    return inspect.isfunction(function) and function.__module__ == module.__name__


def _is_quantized(layer: Any) -> bool:
    return layer.quantization_mode is not None


def _inside(path: str, model: Any) -> str:
    """The path of a layer within the model; of the loss outside of it."""
    return path.removeprefix(f"{model.name}/") or "loss"


def _to_tensor(array: Any) -> Any:
    return None if array is None else keras.ops.convert_to_tensor(array)


_SAMPLERS = ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial")


@contextlib.contextmanager
def drawn_in_float32() -> Iterator[None]:
    """Within it all random numbers of Keras are drawn in float32, and cast.

    Frameworks draw float16 numbers otherwise than float32 ones, from the same seed: dropout would
    hide other elements in float16 than in its reference, and the two could not be compared.
    """
    module = random_functions
    with contextlib.ExitStack() as stack:
        for name in _SAMPLERS:
            stack.enter_context(replaced(module, name, _sampler(getattr(module, name))))
        stack.enter_context(replaced(module, "dropout", _dropout(module.dropout)))
        yield


def _sampler(draw: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(draw)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        dtype = given.arguments.get("dtype")
        if dtype is None or keras.backend.standardize_dtype(dtype) not in NARROW:
            return draw(*args, **kwargs)
        given.arguments["dtype"] = "float32"
        return keras.ops.cast(draw(*given.args, **given.kwargs), dtype)

    return drawn


def _dropout(drop: Callable[..., Any]) -> Callable[..., Any]:
    def dropped(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if dtype not in NARROW:
            return drop(inputs, rate, noise_shape, seed)
        kept = drop(keras.ops.ones_like(inputs, dtype="float32"), rate, noise_shape, seed)
        # An infinity that is dropped is none.
        zeros = keras.ops.zeros_like(inputs)
        return keras.ops.where(kept != 0, inputs * keras.ops.cast(kept, dtype), zeros)

    return dropped

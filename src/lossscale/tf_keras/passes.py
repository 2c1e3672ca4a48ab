"""Passes of a tf_keras model in float32 and in float16, and what its layers return.

Layers of tf_keras assign to their variables as they compute: those are put back after each pass.
All runs eagerly, so that what a layer returns in a loop can be seen as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
import tf_keras

from lossscale.common.monkeypatch import replace
from lossscale.diagnosis.passes import MODEL
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
from lossscale.tensorflow import passes
from lossscale.tensorflow.passes import Draws, repeatable_draws
from lossscale.tf_keras.private_names import (
    AutoCastVariable,
    RandomGenerator,
    create_autocast_variable,
)

_CAST_BY_THEMSELVES = (
    tf_keras.layers.Embedding,
    tf_keras.layers.BatchNormalization,
    tf_keras.layers.LayerNormalization,
)
"""Layers that compute with their variables in float32, or cast what they have read."""
_LISTS_OF_KERAS = ("_trainable_weights", "_non_trainable_weights")
_FUNCTIONS = ("matmul", "einsum", "tensordot")
"""What layers call that may leave the range of float16 before they return."""


class TFKerasRun(ModelRun):
    """Passes of a tf_keras model.

    Args:
        model: A `tf_keras.Model` that has its variables.
        loss_fn, parameters: As for `lossscale.diagnosis.diagnose`.
    """

    library = tf_keras
    ops = SimpleNamespace(
        abs=tf.abs,
        all=tf.reduce_all,
        cast=tf.cast,
        is_tensor=tf.is_tensor,
        isfinite=tf.math.is_finite,
        max=tf.reduce_max,
        minimum=tf.minimum,
        reshape=tf.reshape,
        stack=tf.stack,
        sum=tf.reduce_sum,
        where=tf.where,
    )

    def __init__(self, model: Any, loss_fn: Any = None, parameters: Any = None) -> None:
        super().__init__(model, loss_fn, parameters)
        casts = cast_to_float16(model, "tf_keras", _asks, _has_narrow_variables)
        self._casts = {id(layer) for layer in casts}
        self.setting = f"tf_keras, {'mixed_float16' if casts else 'its own float16'}"

    def is_compiled(self, model: Any) -> bool:
        """Whether `compile` was called."""
        return bool(getattr(model, "compiled_loss", None))

    def name_of(self, variable: Any) -> str:
        """Returns the name of a variable."""
        return str(variable.name).removesuffix(":0")

    def scale_in_use(self) -> float | None:
        """The loss scale of the model's optimizer; None if it has none."""
        optimizer = getattr(self.model, "optimizer", None)
        if isinstance(optimizer, LossScaleOptimizer):
            return float(tf.convert_to_tensor(optimizer._current_scale()))
        if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
            return float(tf.convert_to_tensor(optimizer.loss_scale))
        return None

    def check(self, batch: Any) -> None:
        """Checks a batch before it is used."""
        model = self.model
        if self.loss_fn is not None:
            return check_batch(batch, [], needs_targets=False)
        own = type(model).compute_loss is not tf_keras.Model.compute_loss
        needs = not own and any(tf.nest.flatten(model.compiled_loss._user_losses))
        inputs = [each for each in model.inputs or () if each.shape.rank is not None]
        return check_batch(batch, inputs, needs_targets=needs)

    def values(self, wide: bool) -> list[Any]:
        """Returns the trainable variables themselves."""
        return self.variables

    @contextlib.contextmanager
    def running(self, half: bool) -> Iterator[None]:
        """Within it the model computes in float32 or in float16; after it, it is as before."""
        policy = tf_keras.mixed_precision.Policy("mixed_float16" if half else "float32")
        attributes = {
            "_dtype_policy": policy,
            "_compute_dtype_object": tf.as_dtype(policy.compute_dtype),
        }

        def wanted(layer: Any) -> dict[str, Any]:
            if half:
                return {**attributes, **_read_in_float16(layer)} if id(layer) in self._casts else {}
            narrow = layer.compute_dtype in NARROW and not _has_narrow_variables(layer)
            return attributes if narrow else {}

        with computing_in(self.model._flatten_layers(), wanted):
            yield

    def forward(self, values: Sequence[Any], batch: Any, watcher: Watcher | None) -> Any:
        """Returns what the loss function returns."""
        batch = tf.nest.map_structure(_to_tensor, tuple(batch))
        watching = contextlib.nullcontext() if watcher is None else self._watching(watcher)
        with same_draws(), self._put_back(), self._loss_of_its_own(), watching:
            return (self.loss_fn or _loss_of_compile)(self.model, batch)

    def new_watcher(self, change: Change) -> Watcher:
        """Returns what keeps the results of layers."""
        return Watcher(change, tf.is_tensor, tf.nest.map_structure, tf.executing_eagerly)

    def derive(self, forward: Forward, values: Any, scale: Any, inside: bool) -> Derived:
        """Computes the losses, and their gradients."""
        return Derived(*passes.derive(forward, values, scale, inside))

    @contextlib.contextmanager
    def _watching(self, watcher: Watcher) -> Iterator[None]:
        """Within it a watcher sees what layers and products of tensors return."""
        model, path = self.model, []
        call = tf_keras.layers.Layer.__call__

        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path.append(layer.name)
            try:
                returned = call(layer, *args, **kwargs)
                name = MODEL if layer is model else f"{within()} (output)"
            finally:
                path.pop()
            return watcher.keep(name, returned)

        def within() -> str:
            return "/".join(path[1:] if path[:1] == [model.name] else path) or "loss"

        with contextlib.ExitStack() as stack:
            replace(stack, tf_keras.layers.Layer, "__call__", called)
            for module in (tf, tf.compat.v2):
                for name in _FUNCTIONS:
                    watched = watcher.operation(getattr(module, name), within, name)
                    replace(stack, module, name, watched)
            yield

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        """After it every variable that is not trained, and every random seed, is as before."""
        model = self.model
        variables = {id(variable): variable for variable in model.non_trainable_variables}
        for metric in model.metrics:
            variables.update((id(variable), variable) for variable in metric.variables)
        generators = [
            layer._random_generator
            for layer in model._flatten_layers()
            if hasattr(layer, "_random_generator")
        ]
        seeds = [generator._seed for generator in generators]
        for generator in generators:
            if generator._generator is not None:
                variables[id(generator)] = generator._generator.state
        values = [(variable, variable.numpy()) for variable in variables.values()]
        try:
            yield
        finally:
            for variable, value in values:
                variable.assign(value)
            for generator, seed in zip(generators, seeds, strict=True):
                generator._seed = seed

    @contextlib.contextmanager
    def _loss_of_its_own(self) -> Iterator[None]:
        """Within it the model has a new copy of its loss, with metrics of its own."""
        loss = getattr(self.model, "compiled_loss", None)
        if loss is None:
            yield
            return
        names = getattr(self.model, "output_names", None)
        copy = type(loss)(loss._user_losses, loss._user_loss_weights, output_names=names)
        with replaced(self.model, "compiled_loss", copy):
            yield


new_run = TFKerasRun
"""Returns what computes passes of a model as it is when it is called."""


def _loss_of_compile(model: Any, batch: Any) -> Any:
    x, y, sample_weight = batch
    y_pred = model(x, training=True)
    with naming_targets(y, y_pred):
        loss = model.compute_loss(x, y, y_pred, sample_weight)
    if loss is None:
        raise without_a_loss(model)
    return loss


def _asks(layer: Any) -> bool:
    """Whether a layer was made with a dtype of its own."""
    return (arguments_of(layer) or {}).get("dtype") is not None


def _has_narrow_variables(layer: Any) -> bool:
    # A variable that is float16 itself would not fit to the others.
    return layer.variable_dtype in NARROW


def _read_in_float16(layer: Any) -> dict[str, Any]:
    """The attributes of a layer that hold variables, as ones that a float16 layer would have."""
    if isinstance(layer, _CAST_BY_THEMSELVES):
        return {}
    found = {}
    for name, value in vars(layer).items():
        # Those that are tracked by Keras stay as they are: it looks variables up there.
        if name.startswith("_self_") or name in _LISTS_OF_KERAS:
            continue
        if isinstance(value, tf.Variable):
            found[name] = _autocast(value)
        elif isinstance(value, list) and any(isinstance(each, tf.Variable) for each in value):
            found[name] = [_autocast(each) for each in value]
    return found


def _autocast(value: Any) -> Any:
    if not isinstance(value, tf.Variable) or not value.dtype.is_floating:
        return value
    return value if isinstance(value, AutoCastVariable) else create_autocast_variable(value)


def _to_tensor(array: Any) -> Any:
    return None if array is None else tf.convert_to_tensor(array)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Within it functions that are traced draw numbers that are the same in every run."""
    generator = RandomGenerator
    with repeatable_draws() as draws:
        stand_ins = {
            "random_normal": _sampler(draws, "normal"),
            "random_uniform": _sampler(draws, "uniform"),
            "truncated_normal": _sampler(draws, "truncated_normal"),
            "dropout": lambda self, inputs, rate, noise_shape=None: draws.dropout(
                inputs, rate, noise_shape
            ),
        }
        before = {name: getattr(generator, name) for name in stand_ins}
        try:
            for name, method in stand_ins.items():
                setattr(generator, name, method)
            yield
        finally:
            for name, method in before.items():
                setattr(generator, name, method)


def _sampler(draws: Draws, name: str) -> Any:
    draw = getattr(draws, name)

    def drawn(
        self: Any, shape: Any, *bounds: Any, dtype: Any = None, nonce: Any = None, **named: Any
    ) -> Any:
        del self, nonce
        return draw(shape, *bounds, dtype=dtype or tf_keras.backend.floatx(), **named)

    return drawn

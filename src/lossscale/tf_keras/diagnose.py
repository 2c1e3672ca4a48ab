"""Measures the gradients of a compiled tf_keras model, and leaves the model as it was.

Layers of tf_keras assign to their variables as they compute: those are put back after each run. For
the reference the layers compute in float32, whatever their dtype policy, because a gradient in
float16 cannot show what it lost; for what float16 makes of it they compute in float16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from lossscale.common.diagnosis import ModelGradients, looking_inside, measured
from lossscale.common.probing import Probe, described
from lossscale.diagnostics.batch_checks import check_batch, naming_targets
from lossscale.diagnostics.batches import Batch
from lossscale.diagnostics.fidelity_meter import fidelity_at
from lossscale.diagnostics.measurement import NARROW, Derived, paths_of
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.tapping import Library, Tap, TappedModel, replaced
from lossscale.diagnostics.verdict import Thresholds
from lossscale.keras_common.measuring import (
    check_ready,
    computing_in_float16,
    computing_in_float32,
    without_a_loss,
)
from lossscale.keras_common.own_step import Attempt, attempted, peeked
from lossscale.optimizer import LossScaleOptimizer
from lossscale.tensorflow import counting
from lossscale.tf_keras.draws import same_draws
from lossscale.tf_keras.own_step import new_step
from lossscale.tf_keras.private_names import (
    AutoCastVariable,
    create_autocast_variable,
)

_CAST_BY_THEMSELVES = (
    tf_keras.layers.Embedding,
    tf_keras.layers.BatchNormalization,
    tf_keras.layers.LayerNormalization,
)
"""Layers that compute with their variables in float32, or cast what they have read."""

_LISTS_OF_KERAS = ("_trainable_weights", "_non_trainable_weights")


def _graph_of(layer: Any) -> Any:
    return layer if getattr(layer, "_is_graph_network", False) else None


_LIBRARY = Library(
    graph_of=_graph_of,
    is_softmax=lambda layer: isinstance(layer, tf_keras.layers.Softmax),
    linear=tf_keras.activations.linear,
    flatten=tf.nest.flatten,
    map_structure=tf.nest.map_structure,
)


def measure(
    model: Any,
    batches: Iterable[Batch],
    after_batch: Callable[[int], None],
    *,
    thresholds: Thresholds,
    quick: bool,
) -> GradientReport:
    """Returns the report on the gradients of a model.

    Args:
        model: A compiled `tf_keras.Model` that has its variables.
        batches: What to measure on; at least one.
        after_batch: Called after every batch with the number of batches so far.
        thresholds: Where the verdicts begin.
        quick: Whether to compute in float32 only, and predict.

    Raises:
        ArgumentError: If the model is not compiled, has no loss, or has no variables.
    """
    _check_ready(model)
    paths = paths_of([variable.name.removesuffix(":0") for variable in model.trainable_variables])
    names = [name for name, _ in paths]
    tapped_model = TappedModel(model, _LIBRARY)
    layers = list(model._flatten_layers())
    narrow = {layer.dtype_policy.name for layer in layers if layer.compute_dtype in NARROW}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_put_back(model, layers))
        first, all_batches = peeked(batches)
        own = _own_step(model, first, helps=True)
        has_loss: list[bool] = []

        def prepare(batch: Batch) -> None:
            own.check(model, batch, _needs_targets)
            if own.step is None and not has_loss:
                has_loss.append(True)
                stack.enter_context(_loss_of_its_own(model, batch))

        stack.enter_context(own.explained())
        measurement, fidelity = measured(
            own.gradients(names, counting.on_host) or gradients_of(model, tapped_model, names),
            all_batches,
            prepare,
            counting.count,
            paths,
            in_use=own.in_use(model, _scale_in_use),
            after_batch=after_batch,
            thresholds=thresholds,
            quick=quick,
        )
    floatx = tf_keras.backend.floatx()
    return own.told(
        measurement.report(model, "tf_keras", narrow, floatx, paths, tapped_model), fidelity
    )


def gradients_of(
    model: Any, tapped_model: TappedModel | None, names: Sequence[str]
) -> ModelGradients:
    """Returns the gradients of a model in float32 and in float16.

    Args:
        model: A compiled model that has its variables.
        tapped_model: Where to tap it, or None.
        names: The names of its trainable variables.
    """
    variables = list(model.trainable_variables)

    def loss_of(values: Sequence[Any], batch: Any, tap: Tap) -> Any:
        del values
        x, y, sample_weight = batch
        with contextlib.nullcontext() if tapped_model is None else tapped_model.installed(tap):
            y_pred = model(x, training=True)
            if tapped_model is not None:
                y_pred = tapped_model.on_outputs(y_pred, tap)
            with naming_targets(y, y_pred):
                loss = model.compute_loss(x, y, y_pred, sample_weight)
        if loss is None:
            raise without_a_loss(model)
        return tf.cast(loss, tf_keras.backend.floatx())

    wide, narrow = (
        counting.differentiator(loss_of, lambda: variables, autograph=True, tapped=tapped)
        for tapped in (tapped_model is not None, False)
    )

    def in_float32(batch: Any, scale: float) -> list[Derived]:
        with _running(model, True):
            return wide(batch, scale)

    def in_float16(batch: Any, scale: float) -> list[Derived]:
        with _running(model, False):
            return narrow(batch, scale)

    return ModelGradients(
        looking_inside(in_float32, tapped_model), in_float16, names, counting.on_host
    )


def new_probe(model: Any, batch: Batch) -> Probe:
    """Returns what measures fidelity on a batch, given a loss scale, while a model trains.

    Args:
        model: The compiled model.
        batch: The batch.

    Raises:
        ArgumentError: If the model has no loss, or the batch does not fit it.
    """
    _check_ready(model)
    names = [variable.name.removesuffix(":0") for variable in model.trainable_variables]
    layers = dict(paths_of(names))
    own = _own_step(model, batch, helps=False)
    own.check(model, batch, _needs_targets)
    gradients = own.gradients(list(layers), counting.on_host)
    if gradients is not None:
        replacing: Callable[[], Any] = contextlib.nullcontext
    else:
        own.warn()
        gradients = gradients_of(model, None, list(layers))
        copy = _copy_of_loss(model, batch)
        replacing = functools.partial(replaced, model, "compiled_loss", copy)

    def probe(scale: float) -> dict[str, dict[str, float]]:
        with replacing():
            return described(fidelity_at(gradients, tuple(batch), scale, layers), layers)

    return probe


def _own_step(model: Any, batch: Batch, *, helps: bool) -> Attempt:
    """What came of running the model's own `train_step` on a batch, if it has one."""
    check_batch(batch, [], needs_targets=False)
    return attempted(
        model,
        tf_keras.Model,
        lambda: new_step(model, functools.partial(_running, model)),
        tuple(batch),
        helps=helps,
    )


def _check_ready(model: Any) -> None:
    check_ready(
        model,
        tf_keras.Model,
        is_compiled=bool(getattr(model, "compiled_loss", None)),
        input_name="an Input",
    )


@contextlib.contextmanager
def _running(model: Any, in_float32: bool) -> Iterator[None]:
    """Within it a model computes in float32 or in float16; after it, it is as it was before."""
    layers = list(model._flatten_layers())
    computing = _computing_in_float32 if in_float32 else _computing_in_float16
    # Each run draws the same random numbers, and starts with the same statistics.
    with _put_back(model, layers), same_draws(), computing(layers):
        yield


def _scale_in_use(optimizer: Any) -> float | None:
    if isinstance(optimizer, LossScaleOptimizer):
        return float(tf.convert_to_tensor(optimizer._current_scale()))
    if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
        return float(tf.convert_to_tensor(optimizer.loss_scale))
    return None


def _needs_targets(model: Any) -> bool:
    own = type(model).compute_loss is not tf_keras.Model.compute_loss
    return not own and any(tf.nest.flatten(model.compiled_loss._user_losses))


@contextlib.contextmanager
def _put_back(model: Any, layers: Sequence[Any]) -> Iterator[None]:
    """After it every variable that is not trained, and every random seed, is as it was before."""
    variables = {id(variable): variable for variable in model.non_trainable_variables}
    for metric in model.metrics:
        variables.update((id(variable), variable) for variable in metric.variables)
    generators = [
        layer._random_generator for layer in layers if hasattr(layer, "_random_generator")
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


def _computing_in_float32(layers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    return computing_in_float32(layers, _has_narrow_variables, _computing_in("float32"))


def _computing_in_float16(layers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    return computing_in_float16(
        layers,
        _has_narrow_variables,
        lambda layer: {**_computing_in("mixed_float16"), **_cast_when_read(layer)},
    )


def _computing_in(policy: str) -> dict[str, Any]:
    found = tf_keras.mixed_precision.Policy(policy)
    return {"_dtype_policy": found, "_compute_dtype_object": tf.as_dtype(found.compute_dtype)}


def _has_narrow_variables(layer: Any) -> bool:
    # A variable that is float16 itself would not fit to the others.
    return layer.variable_dtype in NARROW


def _cast_when_read(layer: Any) -> dict[str, Any]:
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
    if isinstance(value, AutoCastVariable):
        return value
    return create_autocast_variable(value)


@contextlib.contextmanager
def _loss_of_its_own(model: Any, batch: Batch) -> Iterator[None]:
    """Within it the model has a new copy of its loss, with metrics of its own."""
    with replaced(model, "compiled_loss", _copy_of_loss(model, batch)):
        yield


def _copy_of_loss(model: Any, batch: Batch) -> Any:
    loss = model.compiled_loss
    copy = type(loss)(
        loss._user_losses,
        loss._user_loss_weights,
        output_names=getattr(model, "output_names", None),
    )
    # It makes variables when it is first called, which a function that is traced again must not.
    returned = tf.function(lambda x: model(x, training=False)).get_concrete_function(
        tf.nest.map_structure(tf.convert_to_tensor, batch.x)
    )
    copy.build(returned.structured_outputs)
    return copy

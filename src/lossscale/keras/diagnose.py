"""Measures the gradients of a compiled Keras 3 model, and leaves the model as it was.

Everything runs in a `keras.StatelessScope`, which takes what would be assigned to any variable:
statistics of normalizations, states of random seeds, metrics. For the reference the layers compute
in float32, whatever their dtype policy, because a gradient in float16 cannot show what it lost; for
what float16 makes of it they compute in float16. Their policies are put back after each run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from lossscale.common.diagnosis import ModelGradients, looking_inside, measured
from lossscale.common.probing import Probe, described
from lossscale.diagnostics.batch_checks import check_batch, naming_targets
from lossscale.diagnostics.batches import Batch
from lossscale.diagnostics.fidelity_meter import fidelity_at
from lossscale.diagnostics.measurement import NARROW, Derived, paths_of
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.tapping import Library, Tap, TappedModel, replaced
from lossscale.diagnostics.verdict import Thresholds
from lossscale.keras.backends import counting
from lossscale.keras.draws import drawn_in_float32
from lossscale.keras.own_step import new_step
from lossscale.keras.slots import numpy_of
from lossscale.keras_common.measuring import (
    check_ready,
    computing_in_float16,
    computing_in_float32,
    without_a_loss,
)
from lossscale.keras_common.own_step import Attempt, attempted, peeked
from lossscale.optimizer import LossScaleOptimizer


def _graph_of(layer: Any) -> Any:
    if isinstance(layer, keras.Sequential):
        layer = layer._functional
    return layer if isinstance(layer, keras.Function) else None


_LIBRARY = Library(
    graph_of=_graph_of,
    is_softmax=lambda layer: isinstance(layer, keras.layers.Softmax),
    linear=keras.activations.linear,
    flatten=keras.tree.flatten,
    map_structure=keras.tree.map_structure,
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
        model: A compiled `keras.Model` that has its variables.
        batches: What to measure on; at least one.
        after_batch: Called after every batch with the number of batches so far.
        thresholds: Where the verdicts begin.
        quick: Whether to compute in float32 only, and predict.

    Raises:
        ArgumentError: If the model is not compiled, has no loss, or has no variables.
    """
    _check_ready(model)
    paths = paths_of([variable.path for variable in model.trainable_variables])
    names = [name for name, _ in paths]
    tapped_model = TappedModel(model, _LIBRARY)
    backend = counting.load()
    narrow = {x.dtype_policy.name for x in model._flatten_layers() if x.compute_dtype in NARROW}
    with backend.random_state_kept(), _loss_of_its_own(model):
        first, all_batches = peeked(batches)
        own = _own_step(model, first, helps=True)
        with own.explained():
            measurement, fidelity = measured(
                own.gradients(names, backend.on_host) or gradients_of(model, tapped_model, names),
                all_batches,
                lambda batch: own.check(model, batch, _needs_targets),
                backend.count,
                paths,
                in_use=own.in_use(model, _scale_in_use),
                after_batch=after_batch,
                thresholds=thresholds,
                quick=quick,
            )
    framework = f"Keras on {keras.backend.backend()}"
    report = measurement.report(
        model, framework, narrow, keras.config.floatx(), paths, tapped_model
    )
    return own.told(report, fidelity)


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
    trained = {id(variable) for variable in variables}
    fixed = [variable for variable in model.variables if id(variable) not in trained]

    def loss_of(values: Sequence[tuple[Any, Any]], batch: Any, tap: Tap) -> Any:
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        for variable, value in values:
            # Not through the constructor, which would narrow the value to the variable's dtype.
            scope.add_update((variable, value))
        x, y, sample_weight = keras.tree.map_structure(_to_tensor, tuple(batch))
        with (
            contextlib.nullcontext() if tapped_model is None else tapped_model.installed(tap),
            scope,
        ):
            training = {"training": True} if model._call_has_training_arg else {}
            y_pred = model(x, **training)
            if tapped_model is not None:
                y_pred = tapped_model.on_outputs(y_pred, tap)
            _check_loss(model)
            with naming_targets(y, y_pred):
                loss = model._compute_loss(x, y, y_pred, sample_weight, training=True)
        return keras.ops.cast(loss, keras.config.floatx())

    backend = counting.load()
    wide = backend.differentiator(
        loss_of, variables, fixed, wide=True, tapped=tapped_model is not None
    )
    narrow = backend.differentiator(loss_of, variables, fixed, wide=False, tapped=False)

    def in_float32(batch: Any, scale: float) -> list[Derived]:
        with drawn_in_float32(), _computing_in_float32(model):
            return wide(batch, scale)

    def in_float16(batch: Any, scale: float) -> list[Derived]:
        with drawn_in_float32(), _computing_in_float16(model):
            return narrow(batch, scale)

    return ModelGradients(
        looking_inside(in_float32, tapped_model), in_float16, names, backend.on_host
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
    layers = dict(paths_of([variable.path for variable in model.trainable_variables]))
    backend = counting.load()
    with backend.random_state_kept(), _loss_of_its_own(model):
        own = _own_step(model, batch, helps=False)
    own.check(model, batch, _needs_targets)
    gradients = own.gradients(list(layers), backend.on_host)
    if gradients is None:
        own.warn()
        gradients = gradients_of(model, None, list(layers))

    def probe(scale: float) -> dict[str, dict[str, float]]:
        with backend.random_state_kept(), _loss_of_its_own(model):
            return described(fidelity_at(gradients, tuple(batch), scale, layers), layers)

    return probe


def _own_step(model: Any, batch: Batch, *, helps: bool) -> Attempt:
    """What came of running the model's own `train_step` on a batch, if it has one."""
    check_batch(batch, [], needs_targets=False)
    return attempted(
        model,
        keras.Model,
        lambda: new_step(model, _computing_in_float32, _computing_in_float16),
        tuple(batch),
        helps=helps,
    )


def _check_ready(model: Any) -> None:
    check_ready(model, keras.Model, is_compiled=model.compiled, input_name="a keras.Input")


def _scale_in_use(optimizer: Any) -> float | None:
    if isinstance(optimizer, LossScaleOptimizer):
        return float(keras.ops.convert_to_numpy(optimizer._current_scale()))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        dynamic = getattr(optimizer, "dynamic_scale", None)
        scale = optimizer.initial_scale if dynamic is None else numpy_of(dynamic)
        return float(scale)
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else float(factor)


def _needs_targets(model: Any) -> bool:
    loss = model._compile_loss
    own = type(model).compute_loss is not keras.Model.compute_loss
    return loss is not None and not own and any(keras.tree.flatten(loss._user_loss))


def _check_loss(model: Any) -> None:
    overridden = type(model).compute_loss is not keras.Model.compute_loss
    if model._compile_loss is None and not overridden and not model.losses:
        raise without_a_loss(model)


def _computing_in_float32(model: Any) -> contextlib.AbstractContextManager[None]:
    return computing_in_float32(
        model._flatten_layers(), _is_quantized, {"_dtype_policy": keras.DTypePolicy("float32")}
    )


def _computing_in_float16(model: Any) -> contextlib.AbstractContextManager[None]:
    return computing_in_float16(
        model._flatten_layers(),
        _is_quantized,
        lambda layer: {"_dtype_policy": keras.DTypePolicy("mixed_float16")},
    )


def _is_quantized(layer: Any) -> bool:
    return layer.quantization_mode is not None


@contextlib.contextmanager
def _loss_of_its_own(model: Any) -> Iterator[None]:
    """Within it the model has a new copy of its loss, which is built when it is called first."""
    loss = model._compile_loss
    if loss is None:
        yield
        return
    copy = type(loss)(loss._user_loss, loss._user_loss_weights, output_names=loss.output_names)
    with replaced(model, "_compile_loss", copy):
        yield


def _to_tensor(array: Any) -> Any:
    return None if array is None else keras.ops.convert_to_tensor(array)

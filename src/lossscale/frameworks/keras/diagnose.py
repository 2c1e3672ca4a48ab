"""Measures the gradients of a compiled Keras 3 model, and leaves the model as it was.

Everything runs in a `keras.StatelessScope`, which takes what would be assigned to any variable:
statistics of normalizations, states of random seeds, metrics. The layers compute in float32
meanwhile, whatever their dtype policy, because a gradient in float16 cannot show what it lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional

from lossscale.diagnostics.batch_checks import check_batch, inputs_of, naming_targets
from lossscale.diagnostics.batches import Batch
from lossscale.diagnostics.measurement import NARROW, Measurement, paths_of
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.tapping import Library, Tap, Taps, replaced
from lossscale.frameworks.keras.backends import counting
from lossscale.frameworks.shell.measuring import check_ready, computing_in_float32, without_a_loss


def _graph_of(layer: Any) -> Any:
    if isinstance(layer, keras.Sequential):
        layer = layer._functional
    return layer if isinstance(layer, Functional) else None


_LIBRARY = Library(
    graph_of=_graph_of,
    is_softmax=lambda layer: isinstance(layer, keras.layers.Softmax),
    linear=keras.activations.linear,
    flatten=keras.tree.flatten,
    map_structure=keras.tree.map_structure,
)


def measure(
    model: Any, batches: Iterable[Batch], after_batch: Callable[[int], None]
) -> GradientReport:
    """Returns the report on the gradients of a model.

    Args:
        model: A compiled `keras.Model` that has its variables.
        batches: What to measure on; at least one.
        after_batch: Called after every batch with the number of batches so far.

    Raises:
        ArgumentError: If the model is not compiled, has no loss, or has no variables.
    """
    check_ready(model, is_compiled=model.compiled, input_name="a keras.Input")
    variables = list(model.trainable_variables)
    trained = {id(variable) for variable in variables}
    fixed = [variable for variable in model.variables if id(variable) not in trained]
    paths = paths_of([variable.path for variable in variables])
    taps = Taps(model, _LIBRARY)
    inputs, needs_targets = inputs_of(model), _needs_targets(model)

    def loss_of(values: Sequence[tuple[Any, Any]], batch: Any, tap: Tap) -> Any:
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        for variable, value in values:
            # Not through the constructor, which would narrow the value to the variable's dtype.
            scope.add_update((variable, value))
        x, y, sample_weight = keras.tree.map_structure(_to_tensor, tuple(batch))
        with taps.installed(tap), scope:
            training = {"training": True} if model._call_has_training_arg else {}
            y_pred = taps.on_outputs(model(x, **training), tap)
            _check_loss(model)
            with naming_targets(y, y_pred):
                loss = model._compute_loss(x, y, y_pred, sample_weight, training=True)
        return keras.ops.cast(loss, keras.config.floatx())

    measured = Measurement(after_batch)
    narrow = {x.dtype_policy.name for x in model._flatten_layers() if x.compute_dtype in NARROW}
    backend = counting.load()
    with backend.random_state_kept(), _computing_in_float32(model), _loss_of_its_own(model):
        count = backend.counter(loss_of, variables, fixed)
        for batch in batches:
            check_batch(batch, inputs, needs_targets=needs_targets)
            measured.add(batch, count(batch))
    framework = f"Keras on {keras.backend.backend()}"
    return measured.report(model, framework, narrow, keras.config.floatx(), paths, taps)


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
        model._flatten_layers(),
        lambda layer: layer.quantization_mode is not None,
        {"_dtype_policy": keras.DTypePolicy("float32")},
    )


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

"""Measures the gradients of a compiled tf_keras model, and leaves the model as it was.

Layers of tf_keras assign to their variables as they compute: those are put back afterwards. The
layers compute in float32 meanwhile, whatever their dtype policy, because a gradient in float16
cannot show what it lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from lossscale.diagnostics.batch_checks import check_batch, inputs_of, naming_targets
from lossscale.diagnostics.batches import Batch
from lossscale.diagnostics.measurement import NARROW, Measurement, paths_of
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.tapping import Library, Tap, Taps, replaced
from lossscale.frameworks.shell.measuring import check_ready, computing_in_float32, without_a_loss
from lossscale.frameworks.tensorflow.counting import counter


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
    model: Any, batches: Iterable[Batch], after_batch: Callable[[int], None]
) -> GradientReport:
    """Returns the report on the gradients of a model.

    Args:
        model: A compiled `tf_keras.Model` that has its variables.
        batches: What to measure on; at least one.
        after_batch: Called after every batch with the number of batches so far.

    Raises:
        ArgumentError: If the model is not compiled, has no loss, or has no variables.
    """
    is_compiled = bool(getattr(model, "compiled_loss", None))
    check_ready(model, is_compiled=is_compiled, input_name="an Input")
    variables = list(model.trainable_variables)
    paths = paths_of([variable.name.removesuffix(":0") for variable in variables])
    taps = Taps(model, _LIBRARY)
    inputs, needs_targets = inputs_of(model), _needs_targets(model)

    def loss_of(values: Sequence[Any], batch: Any, tap: Tap) -> Any:
        del values
        x, y, sample_weight = batch
        with taps.installed(tap):
            y_pred = taps.on_outputs(model(x, training=True), tap)
            with naming_targets(y, y_pred):
                loss = model.compute_loss(x, y, y_pred, sample_weight)
        if loss is None:
            raise without_a_loss(model)
        return loss

    measured = Measurement(after_batch)
    layers = list(model._flatten_layers())
    narrow = {layer.dtype_policy.name for layer in layers if layer.compute_dtype in NARROW}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_put_back(model, layers))
        stack.enter_context(_computing_in_float32(layers))
        count = counter(loss_of, lambda: variables, autograph=True)
        for number, batch in enumerate(batches, start=1):
            check_batch(batch, inputs, needs_targets=needs_targets)
            if number == 1:
                stack.enter_context(_loss_of_its_own(model, batch))
            measured.add(batch, count(tuple(batch)))
    return measured.report(model, "tf_keras", narrow, tf_keras.backend.floatx(), paths, taps)


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
    return computing_in_float32(
        layers,
        # A variable that is float16 itself would not fit to the others.
        lambda layer: layer.variable_dtype in NARROW,
        {
            "_dtype_policy": tf_keras.mixed_precision.Policy("float32"),
            "_compute_dtype_object": tf.float32,
        },
    )


@contextlib.contextmanager
def _loss_of_its_own(model: Any, batch: Batch) -> Iterator[None]:
    """Within it the model has a new copy of its loss, with metrics of its own."""
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
    with replaced(model, "compiled_loss", copy):
        yield

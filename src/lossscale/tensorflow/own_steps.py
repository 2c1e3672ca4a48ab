"""A model's own `train_step` in a `tf.function`, for both generations of Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lossscale.common.user_code import as_written
from lossscale.diagnostics.measurement import Derived
from lossscale.tensorflow.counting import summed
from lossscale.tensorflow.scaling import scaled, unscaled


def runner(
    step: Callable[[Any, Any], Any],
    new_recorder: Callable[[Any], Any],
    variables: Sequence[Any],
    state: Callable[[], Iterable[Any]],
    *,
    autograph: bool,
    eager: bool,
    helped: bool,
) -> Callable[[Any, float], tuple[list[Derived], Any]]:
    """Returns what takes data and a scale, and gives the gradients that a step is taken with.

    Args:
        step: Runs the `train_step` with a recorder in the places of the optimizers, on data.
        new_recorder: Makes a recorder for a scale.
        variables: The trainable variables.
        state: Returns what a step may assign to, where that is not known from a function.
        autograph: Whether `step` may translate what it calls.
        eager: Whether the model is trained eagerly.
        helped: Whether to scale the loss of a step that does not do so itself.
    """
    recorders: list[Any] = []

    @as_written
    def compute(data: Any, scale: Any) -> list[Any]:
        recorder = new_recorder(scale)
        with _scaling_tapes(recorder) if helped else contextlib.nullcontext():
            step(recorder, data)
        found = [_together(given) for given in recorder.given]
        recorder.let_go()
        recorders[:] = [recorder]
        return found

    function = tf.function(compute, autograph=autograph)

    def run(data: Any, scale: float) -> tuple[list[Derived], Any]:
        tensors = tf.nest.map_structure(_to_tensor, data)
        arguments = tensors, tf.constant(scale, tf.float32)
        if eager:
            with _put_back(state()):
                found = compute(*arguments)
        else:
            # A concrete function, which knows its variables: also those that no model lists.
            concrete = function.get_concrete_function(*arguments)
            with _put_back(concrete.graph.variables):
                found = concrete(*arguments)
        derived = [
            Derived(place, _dtype(variable), None, 0)
            if gradient is None
            else Derived(place, _dtype(variable), *gradient)
            for place, (variable, gradient) in enumerate(zip(variables, found, strict=True))
        ]
        return derived, recorders[0]

    return run


@contextlib.contextmanager
def _put_back(variables: Iterable[Any]) -> Iterator[None]:
    """After it variables have the values that they had before."""
    # Memory is copied for those alone that are assigned to.
    before = [(variable, variable.read_value()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def _scaling_tapes(recorder: Any) -> Iterator[None]:
    """Within it gradients by trained variables are taken of a scaled loss, and divided."""
    trained = {id(each) for variable in recorder.variables for each in (variable, _raw(variable))}
    take = tf.GradientTape.gradient

    @as_written
    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        flat = tf.nest.flatten(sources)
        if not flat or not all(id(each) in trained for each in flat):
            # Of a penalty, which is a part of the loss.
            return take(self, target, sources, output_gradients, unconnected_gradients)
        recorder.helped += 1
        ones = [tf.ones_like(each) for each in tf.nest.flatten(target)]
        given = ones if output_gradients is None else tf.nest.flatten(output_gradients)
        larger = [tf.cast(scaled(each, recorder.scale), each.dtype) for each in given]
        found = take(self, target, flat, larger, unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, unscaled(found, recorder.scale, True))

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = take


def _together(given: Sequence[Any]) -> tuple[Any, Any] | None:
    """The gradients of one variable as one array, and how many zeros it lacks."""
    pairs = [summed(gradient) for gradient in given]
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    flat = tf.concat([tf.reshape(values, [-1]) for values, _ in pairs], 0)
    return flat, tf.add_n([tf.cast(lacking, tf.int64) for _, lacking in pairs])


def _raw(variable: Any) -> Any:
    """TensorFlow's variable in one of Keras 3."""
    return (
        getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable
    )


def _dtype(variable: Any) -> str:
    return str(tf.as_dtype(variable.dtype).name)


def _to_tensor(array: Any) -> Any:
    return None if array is None else tf.convert_to_tensor(array)

"""A `train_step` of a user's own on Keras 3, as what gives gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from lossscale.diagnostics.tapping import replaced
from lossscale.keras import backends
from lossscale.keras.backends import own_steps
from lossscale.keras.draws import drawn_in_float32
from lossscale.keras_common.own_step import OwnStep, Ran, Run, attributes_kept, optimizers_of
from lossscale.keras_common.stand_ins import Recorder, Ways

Computing = Callable[[Any], contextlib.AbstractContextManager[None]]


def optimizers(model: Any) -> list[Any]:
    """Returns the optimizers that a model and its layers have."""
    return optimizers_of(model._flatten_layers(), _is_optimizer)


def new_step(model: Any, in_float32: Computing, in_float16: Computing) -> OwnStep:
    """Returns the `train_step` of a model, as what gives gradients.

    Args:
        model: A compiled model that has its variables.
        in_float32: Within what it returns a model computes in float32.
        in_float16: The same for float16.
    """
    backend = backends.load()
    ways = Ways(_is_optimizer, backend.scaled, backend.unscaled, backend.differentiate)
    variables = list(model.trainable_variables)

    def step(recorder: Recorder, *arguments: Any) -> None:
        with recorder.installed(model._flatten_layers()), attributes_kept(model):
            model.train_step(*arguments)

    def new_run(run: Run) -> Callable[[Any, float], Ran]:
        with _prepared(model):
            runner = own_steps.load().runner(
                step,
                lambda scale, values=(): Recorder(ways, variables, scale, values),
                model,
                optimizers(model),
                eager=model.run_eagerly,
                helped=run.helped,
            )
        computing = in_float32 if run.reference else in_float16

        def ran(data: Any, scale: float) -> Ran:
            with drawn_in_float32(), computing(model), _prepared(model):
                return Ran(*runner(data, scale))

        return ran

    return OwnStep(model, new_run, "have gradients taken of {}.scale_loss(loss)")


@contextlib.contextmanager
def _prepared(model: Any) -> Iterator[None]:
    """Within it a model has no metrics of `compile`, which would be made when they are used."""
    with replaced(model, "_compile_metrics", None):
        yield


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, keras.optimizers.Optimizer)

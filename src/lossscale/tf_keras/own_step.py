"""A `train_step` of a user's own on tf_keras, as what gives gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tf_keras

from lossscale.diagnostics.tapping import replaced
from lossscale.keras_common.own_step import OwnStep, Ran, Run, attributes_kept, optimizers_of
from lossscale.keras_common.stand_ins import Recorder, Ways
from lossscale.tensorflow import own_steps
from lossscale.tensorflow.scaling import scaled, unscaled
from lossscale.tensorflow.tape import recorded
from lossscale.tensorflow.tracing import translated
from lossscale.tf_keras.arguments import flat_variables

Running = Callable[[bool], contextlib.AbstractContextManager[None]]


def optimizers(model: Any) -> list[Any]:
    """Returns the optimizers that a model and its layers have."""
    return optimizers_of(model._flatten_layers(), _is_optimizer)


def new_step(model: Any, running: Running) -> OwnStep:
    """Returns the `train_step` of a model, as what gives gradients.

    Args:
        model: A compiled model that has its variables.
        running: Within what it returns a model computes in float32, given True, or in float16;
            and is as it was before after it.
    """
    ways = Ways(_is_optimizer, scaled, unscaled, _differentiated)
    variables = list(model.trainable_variables)
    # Kept, because functions that were traced with their variables do not.
    parts = _compiled_parts(model)

    def step(recorder: Recorder, data: Any) -> None:
        with recorder.installed(model._flatten_layers()), attributes_kept(model):
            translated(model.train_step, by_default=True)(data)

    def state() -> list[Any]:
        found = [*model.variables]
        for optimizer in optimizers(model):
            listed = optimizer.variables
            found += listed() if callable(listed) else listed
        return found

    def new_run(run: Run) -> Callable[[Any, float], Ran]:
        runner = own_steps.runner(
            step,
            lambda scale: Recorder(ways, variables, scale),
            variables,
            state,
            autograph=True,
            eager=model.run_eagerly,
            helped=run.helped,
        )

        def ran(data: Any, scale: float) -> Ran:
            with running(run.reference), _with(model, parts):
                return Ran(*runner(data, scale))

        return ran

    return OwnStep(
        model,
        new_run,
        "have gradients taken of {}.get_scaled_loss(loss), and pass them through its "
        "get_unscaled_gradients",
    )


def _compiled_parts(model: Any) -> dict[str, Any]:
    """A new loss as that of `compile`, and no metrics: they make variables when they are used."""
    names = getattr(model, "output_names", None)
    loss, metrics = model.compiled_loss, model.compiled_metrics
    found = {}
    if loss is not None:
        given = loss._user_losses, loss._user_loss_weights
        found["compiled_loss"] = type(loss)(*given, output_names=names)
    if metrics is not None:
        found["compiled_metrics"] = type(metrics)(output_names=names)
    return found


@contextlib.contextmanager
def _with(model: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in attributes.items():
            stack.enter_context(replaced(model, name, value))
        yield


def _differentiated(
    loss: Any, variables: Any, scale: Callable[[Any], Any], *, tape: Any = None
) -> tuple[list[Any], list[Any]]:
    recording = recorded(loss, variables, scale, tape=tape)
    flat = flat_variables(recording.variables)
    return list(recording.tape.gradient(recording.loss, flat)), flat


def _is_optimizer(value: Any) -> bool:
    kinds = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    return isinstance(value, kinds)

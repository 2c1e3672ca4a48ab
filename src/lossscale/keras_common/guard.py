"""Weights that a forward pass changes, such as moving averages, follow the applied steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import lossscale.framework_types as ft
from lossscale.common.private_names import do_not_convert
from lossscale.errors import ArgumentTypeError, UnsupportedError
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.keras_common.state import parts_of
from lossscale.packages import warn
from lossscale.wrapper import Wrapper

Model = TypeVar("Model")
StepFunction = TypeVar("StepFunction", bound=Callable[..., object])

_ON_JAX = """On JAX a step is a pure function, which chooses its results itself. Where
    trained, variables = optimizer.stateless_apply(optimizer_variables, gradients, trainable)
is called, choose the weights that are not trained from those before and after the forward pass:
    skipped = variables[[v.name for v in optimizer.variables].index("last_step_skipped")]
    non_trainable = [jnp.where(skipped, old, new) for old, new in zip(before, after)]"""


@overload
def guard(model: Model, *optimizers: Wrapper) -> Model: ...
@overload
def guard(model: object, *optimizers: Wrapper, step: StepFunction) -> StepFunction: ...
def guard(model: Any, *optimizers: Any, step: Any = None) -> Any:
    """Makes a skipped step of a model leave alone what its forward pass changed.

    Without it, one batch that overflows float16 in the forward pass leaves the moving averages of
    a `BatchNormalization` NaN, although the step is skipped. `guard` follows every weight that a
    layer creates as not trainable, and the states of stateful recurrent layers. After a skipped
    step these have their values from before the `train_step`. Metrics and the seeds of random
    layers go on.

    It replaces `model.train_step`, before or after `compile`, and works in `fit` and
    `train_on_batch`. Models made by `load_model`, `clone_model`, `copy` or `pickle` are not
    guarded: call it again.

    With `step`, it guards that function of a custom loop instead, and leaves `model.train_step`
    alone. Call the result eagerly, in a `tf.function` or in `strategy.run`.

    Args:
        model: A model of Keras 3 or tf_keras; with `step`, a list of models as well.
        optimizers: The loss scale optimizers whose skips count; by default the one that the model
            is compiled with, and those that are its attributes. With `step`, pass all that it
            uses: a skip of one puts back the weights of all models.
        step: A function that takes one step, with any arguments and results. One that `guard`
            returned is guarded for its models and for these.

    Returns:
        The same model, or the guarded function. A second call for a model replaces the first.

    Raises:
        TypeError: If `model` is not a model, one of `optimizers` not a loss scale optimizer, or
            `step` not callable or given without optimizers.
        NotImplementedError: If there is a `step` on JAX.

    Examples:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
        >>> model = lossscale.keras.guard(model)
        >>> model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
        >>> logs = model.train_on_batch(np.full((4, 2), np.inf), np.ones((4, 2)))
        >>> model.layers[0].moving_mean.numpy()
        array([0., 0.], dtype=float32)
    """
    is_list = step is not None and isinstance(model, (list, tuple)) and len(model) > 0
    models: list[ft.Model] = list(model) if is_list else [model]
    for each in models:
        if not (hasattr(each, "train_step") and hasattr(each, "_flatten_layers")):
            raise ArgumentTypeError(
                "`model` must be a keras.Model or a tf_keras.Model, which has a `train_step`. With "
                f"`step` it may be a list of models. Received: {type(each).__name__}."
            )
    for each in optimizers:
        if not isinstance(each, KerasCommonOptimizer):
            raise ArgumentTypeError(
                "`optimizers` must be the LossScaleOptimizers of the model, as in "
                "lossscale.keras.guard(model, generator_optimizer, discriminator_optimizer). "
                f"Received: {type(each).__name__}."
            )
    if step is None:
        own = model.train_step
        own = own.step if isinstance(own, GuardedStep) else own
        model.train_step = GuardedStep(models, own, optimizers)
        # Keras makes it again, from the new step.
        model.train_function = None
        return model
    if not callable(step) or not optimizers:
        raise ArgumentTypeError(
            "`step` must be a function, given with its LossScaleOptimizers. Write "
            "lossscale.keras.guard(model, optimizer, step=train_step). Received: "
            f"{len(optimizers)} optimizers, and a step of type {type(step).__name__}."
        )
    if optimizers[0]._library.backend.backend() == "jax":
        raise UnsupportedError(_ON_JAX)
    if isinstance(step, GuardedStep) and step.optimizers:
        # One of these models may be run in the pass of another, so a skip of any counts for all.
        models, optimizers = [*step.models, *models], (*step.optimizers, *optimizers)
        step = step.step
    return GuardedStep(models, step, optimizers)


@do_not_convert
class GuardedStep:
    """The `train_step` of a guarded model, or a guarded function.

    An object with the models as an attribute: in a copy of a model it belongs to the copy.
    """

    def __init__(
        self, models: list[ft.Model], step: ft.Function, optimizers: Sequence[Wrapper]
    ) -> None:
        self.models, self.step, self.optimizers = models, step, tuple(optimizers)
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> ft.Structure:
        # Looked up in each step: a model may be built and compiled later.
        found: Sequence[Wrapper] = self.optimizers or _wrappers_of(self.models[0])
        if not found:
            warn(
                "A guarded model needs a LossScaleOptimizer, whose skips it follows. Its optimizer "
                f"is {getattr(self.models[0], 'optimizer', None)}. Compile it with a "
                "lossscale.LossScaleOptimizer, or pass its optimizers to `guard`."
            )
        # A fixed scale that checks nothing never skips.
        found = [each for each in found if each._rule.checks_gradients]
        step = functools.partial(self.step, *args, **kwargs)
        if not found:
            return step()
        arrays, counters = found[0]._arrays, [each._steps_skipped for each in found]
        is_built = all(layer.built for each in self.models for layer in each._flatten_layers())
        if args and len(self.models) == 1 and not is_built:
            # As its first step would, if that has the batch first. A model may not be callable on
            # its inputs alone: then the step makes the weights.
            with contextlib.suppress(Exception):
                batch = args[0]
                arrays.trace_call(self.models[0], batch[0] if isinstance(batch, tuple) else batch)
        weights = guarded_weights(self.models)
        result = arrays.run_guarded(self.models, step, counters, weights)
        if len(guarded_weights(self.models)) > len(weights):
            name = getattr(self, "__name__", "step")
            warn(
                f"The first `{name}` of a guarded model made weights, and is not guarded. Call the "
                f"model, or each of its parts, once before `fit` or before the first `{name}`."
            )
        return result


def _wrappers_of(model: ft.Model) -> list[KerasCommonOptimizer]:
    """The loss scale optimizers of a model: the one it is compiled with, and its attributes."""
    attributes = [getattr(model, "optimizer", None), *vars(model).values()]
    found = [each for attribute in attributes for each in parts_of(attribute)]
    return list({id(x): x for x in found if isinstance(x, KerasCommonOptimizer)}.values())


def guarded_weights(models: Sequence[ft.Model]) -> list[ft.Variable]:
    """The weights that layers made as not trainable, and the states of recurrent layers.

    Neither frozen weights, nor metrics nor seeds.
    """
    found: dict[int, ft.Variable] = {}
    for layer in (layer for model in models for layer in model._flatten_layers()):
        # A metric of tf_keras is a layer. A layer of Keras 3 has the first attribute.
        if not hasattr(layer, "update_state"):
            names = ("_non_trainable_variables", "_non_trainable_weights")
            kept = next(vars(layer)[name] for name in names if name in vars(layer))
            states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
            found |= {id(each): each for each in (*kept, *_variables_in(states))}
    return list(found.values())


def _variables_in(nest: ft.Structure) -> Iterator[ft.Variable]:
    if isinstance(nest, (list, tuple)):
        for each in nest:
            yield from _variables_in(each)
    elif hasattr(nest, "assign"):
        yield nest

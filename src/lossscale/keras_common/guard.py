"""Weights that a forward pass changes, such as moving averages, follow the applied steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import lossscale.framework_types as ft
from lossscale.common.private_names import do_not_convert
from lossscale.errors import ArgumentTypeError
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.keras_common.state import parts_of
from lossscale.members import Wrapper
from lossscale.packages import warn

Model = TypeVar("Model")


def guard(model: Model, *optimizers: Wrapper) -> Model:
    """Makes a skipped step of a model leave alone what its forward pass changed.

    Without it, one batch that overflows float16 in the forward pass leaves the moving averages of
    a `BatchNormalization` NaN, although the step is skipped. `guard` follows every weight that a
    layer creates as not trainable, and the states of stateful recurrent layers. After a skipped
    step these have their values from before the `train_step`. Metrics and the seeds of random
    layers go on.

    It replaces `model.train_step`, before or after `compile`, and works in `fit` and
    `train_on_batch`. Models made by `load_model`, `clone_model`, `copy` or `pickle` are not
    guarded: call it again.

    Args:
        model: A model of Keras 3 or tf_keras.
        optimizers: The loss scale optimizers whose skips count; by default the one that the model
            is compiled with, and those that are its attributes.

    Returns:
        The same model. A second call replaces the first.

    Raises:
        TypeError: If `model` is not a model, or one of `optimizers` not a loss scale optimizer.

    Examples:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
        >>> model = lossscale.keras.guard(model)
        >>> model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
        >>> logs = model.train_on_batch(np.full((4, 2), np.inf), np.ones((4, 2)))
        >>> model.layers[0].moving_mean.numpy()
        array([0., 0.], dtype=float32)
    """
    given: ft.Model = model
    if not callable(getattr(given, "train_step", None)) or not hasattr(given, "_flatten_layers"):
        raise ArgumentTypeError(
            "`model` must be a keras.Model or a tf_keras.Model, which has a `train_step`. "
            f"Received: {type(model).__name__}."
        )
    for each in optimizers:
        if not isinstance(each, KerasCommonOptimizer):
            raise ArgumentTypeError(
                "`optimizers` must be the LossScaleOptimizers of the model, as in "
                "lossscale.keras.guard(model, generator_optimizer, discriminator_optimizer). "
                f"Received: {type(each).__name__}."
            )
    step = given.train_step
    if isinstance(step, GuardedStep):
        step = step.step
    given.train_step = GuardedStep(given, step, optimizers)
    # Keras makes it again, from the new step.
    given.train_function = None
    return model


@do_not_convert
class GuardedStep:
    """The `train_step` of a guarded model.

    An object with the model as an attribute: in a copy of the model it belongs to the copy.
    """

    def __init__(self, model: ft.Model, step: ft.Function, optimizers: Sequence[Wrapper]) -> None:
        self.model, self.step, self.optimizers = model, step, tuple(optimizers)
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> ft.Structure:
        # Looked up in each step: a model may be built and compiled later.
        found: Sequence[Wrapper] = self.optimizers or _wrappers_of(self.model)
        if not found:
            warn(
                "A guarded model needs a LossScaleOptimizer, whose skips it follows. Its optimizer "
                f"is {getattr(self.model, 'optimizer', None)}. Compile it with a "
                "lossscale.LossScaleOptimizer, or pass its optimizers to `guard`."
            )
        # A fixed scale that checks nothing never skips.
        found = [each for each in found if each._rule.checks_gradients]
        if not found:
            return self.step(*args, **kwargs)
        step = functools.partial(self.step, **kwargs) if kwargs else self.step
        return found[0]._arrays.run_guarded(self.model, step, args, found, guarded_weights)


def _wrappers_of(model: ft.Model) -> list[KerasCommonOptimizer]:
    """The loss scale optimizers of a model: the one it is compiled with, and its attributes."""
    attributes = [getattr(model, "optimizer", None), *vars(model).values()]
    found = [each for attribute in attributes for each in parts_of(attribute)]
    return list({id(x): x for x in found if isinstance(x, KerasCommonOptimizer)}.values())


def guarded_weights(model: ft.Model) -> list[ft.Variable]:
    """The weights that layers made as not trainable, and the states of recurrent layers.

    Neither frozen weights, nor metrics nor seeds.
    """
    found: dict[int, ft.Variable] = {}
    for layer in model._flatten_layers():
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

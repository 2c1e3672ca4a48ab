"""The optimizer in Keras' files, and a plain optimizer's checkpoint of TensorFlow in its place."""

from __future__ import annotations

import lossscale.framework_types as ft
from lossscale.errors import ArgumentError
from lossscale.keras.slots import numpy_of
from lossscale.keras.state import OwnVariable
from lossscale.keras_common import saving
from lossscale.keras_common.optimizer import KerasCommonOptimizer


def save_own_variables(optimizer: KerasCommonOptimizer, store: ft.Store) -> None:
    """Writes the loss scale, the counters and variables of a subclass."""
    values = {name: numpy_of(variable) for name, variable in named_variables(optimizer).items()}
    saving.save(optimizer, store, values, optimizer.inner_optimizer.variables)


def load_own_variables(optimizer: KerasCommonOptimizer, store: ft.Store) -> None:
    """Reads these, or the loss scale of Keras' own class."""
    values, numbered = saving.values_in(store)
    # Keras' own class has a step count and a learning rate, which stay 0, these two, and then the
    # inner optimizer's variables, once more.
    if len(numbered) > 4 and not any(each.shape or each for each in numbered[:2]):
        values = {"step_counter": numbered[2], "dynamic_scale": numbered[3]}
        values[saving.SHAPES] = saving.shapes_of(numbered[4:])
    inner = optimizer.inner_optimizer.variables
    saving.load(optimizer, values, named_variables(optimizer), inner)


def named_variables(optimizer: KerasCommonOptimizer) -> dict[str, ft.Variable]:
    """Returns the wrapper's own variables, and those of a subclass, by unique names."""
    named: dict[str, ft.Variable] = {}
    for variable in optimizer._variables:
        name = variable.name
        while name in named:
            name += "_"
        named[name] = variable
    return named


class CounterOfPlain(OwnVariable):
    """Stands where a plain optimizer has its counter of steps, and refuses its checkpoint."""

    def _restore_from_tensors(self, restored_tensors: dict[str, ft.Tensor]) -> None:
        # Keras' own class has a counter here too, which stays 0.
        if sum(restored_tensors.values()) > 0:
            raise ArgumentError(
                "The checkpoint has an optimizer without loss scaling where the "
                "LossScaleOptimizer is. Restore it into the inner optimizer: "
                "tf.train.Checkpoint(optimizer=optimizer.inner_optimizer)."
            )

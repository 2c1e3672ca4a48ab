"""What `lossscale.install()` changes in Keras 3."""

from __future__ import annotations

import contextlib

import keras

# The trainer asks for the class by this name. The public one stays Keras' own.
from keras.src.trainers import trainer

from lossscale.frameworks.common.documented_names import DocumentedNames, Wrapping
from lossscale.frameworks.common.replacing import replace


def put_in_place(names: DocumentedNames) -> contextlib.ExitStack:
    """Lets `compile` wrap optimizers in the documented class.

    Returns:
        A stack that puts back what was there before when it is closed.
    """
    with contextlib.ExitStack() as stack:
        wrapping = Wrapping(
            trainer.LossScaleOptimizer,
            lambda optimizer: names.wrap(optimizer, keras.config.dtype_policy()),
        )
        replace(stack, trainer, "LossScaleOptimizer", wrapping)
        return stack.pop_all()

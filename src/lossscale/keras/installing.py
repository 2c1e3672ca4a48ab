"""What `lossscale.install()` changes in Keras 3."""

from __future__ import annotations

import contextlib

import keras

from lossscale.common.monkeypatch import DocumentedNames, Wrapping, replace
from lossscale.keras import private_names


def put_in_place(names: DocumentedNames) -> contextlib.ExitStack:
    """Lets `compile` wrap optimizers in the documented class.

    Returns:
        A stack that puts back what was there before when it is closed.
    """
    # It asks for the class by its name there. The public one stays Keras' own.
    trainer = private_names.trainer()
    with contextlib.ExitStack() as stack:
        wrapping = Wrapping(
            trainer.LossScaleOptimizer,
            lambda optimizer: names.wrap(optimizer, keras.config.dtype_policy()),
        )
        replace(stack, trainer, "LossScaleOptimizer", wrapping)
        return stack.pop_all()

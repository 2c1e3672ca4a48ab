"""Making Keras and TensorFlow know lossscale: registration for files, and the documented names."""

from __future__ import annotations

import contextlib
import importlib

from lossscale import registry
from lossscale.optimizer import LossScaleOptimizer


def register() -> None:
    """Registers the optimizers with the frameworks that are imported, so that files load.

    `import lossscale` does it for what was imported before. Call it if Keras is imported later
    and a model is loaded before any loss scale optimizer is made.

    Example:
        >>> register()
    """
    experimental = importlib.import_module("lossscale.experimental")
    for shell in registry.loaded_shells():
        registry.combined(experimental.LossScaleOptimizer, shell)


# The installations that are not undone yet, and what takes the names out: the names stand as long
# as one installation asks for them, in whatever order they are undone.
_standing: list[Installation] = []
_taking_out = contextlib.ExitStack()


class Installation:
    """The documented names in TensorFlow; a context manager that takes them out again."""

    def undo(self) -> None:
        """Puts everything back as it was, unless another installation still stands.

        A second call does nothing.
        """
        if self in _standing:
            _standing.remove(self)
            if not _standing:
                _taking_out.close()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def install() -> Installation:
    """Puts the documented names back where the pages of TensorFlow have them.

    For code that must run unedited: `tf.keras.mixed_precision.LossScaleOptimizer`,
    `tf.keras.mixed_precision.experimental`, `tf.mixed_precision.experimental` and
    `tf.train.experimental` with the `LossScale` classes, and the same under `tf.compat.v1` and
    `tf.compat.v2`. Imports TensorFlow.

    Returns:
        An object whose `undo()` takes the names out again; also a context manager that does.

    Example:
        >>> import tensorflow as tf
        >>> with install():
        ...     tf.keras.mixed_precision.experimental.LossScaleOptimizer.__module__
        'lossscale.experimental.optimizer'
    """
    names = importlib.import_module("lossscale.frameworks.tensorflow.names")
    register()
    if not _standing:
        experimental = importlib.import_module("lossscale.experimental")
        loss_scales = [
            experimental.LossScale,
            experimental.FixedLossScale,
            experimental.DynamicLossScale,
        ]
        _taking_out.enter_context(
            names.put_in_place(LossScaleOptimizer, experimental.LossScaleOptimizer, loss_scales)
        )
    installation = Installation()
    _standing.append(installation)
    return installation

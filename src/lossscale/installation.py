"""`install`, which restores the names that TensorFlow documented."""

from __future__ import annotations

import contextlib
import sys

import lossscale.registry as registry
from lossscale.common import replaced_names


class Installation(replaced_names.Installation):
    """The documented names in TensorFlow; a context manager that removes them at its end."""


# The modules that currently have the names.
_reached: set[str] = set()


def install() -> Installation:
    """Restores the names that TensorFlow documented, for code that must run unedited.

    These are `tf.keras.mixed_precision.LossScaleOptimizer`,
    `tf.keras.mixed_precision.experimental`, `tf.mixed_precision.experimental` and
    `tf.train.experimental` with the `LossScale` classes, and the same under `tf.compat.v1` and
    `tf.compat.v2`. Under `mixed_float16`, `compile` then wraps optimizers in this class too.

    The classes belong to the Keras that is `tf.keras`, such as
    `lossscale.keras.LossScaleOptimizer`, so that a program can inherit from them. `install` imports
    TensorFlow and `tf.keras`. If tf_keras is imported later alongside Keras 3, a second call adds
    the names there.

    Returns:
        An object whose `undo()` removes the names; also a context manager that does so. The object
        of the first call removes those of later calls too, whose own `undo()` does nothing.

    Raises:
        ImportError: If TensorFlow is not installed.

    Examples:
        >>> import tensorflow as tf
        >>> with install():
        ...     tf.keras.mixed_precision.LossScaleOptimizer.__module__
        'lossscale.keras'
    """
    put_into = registry.package("lossscale.install_names").PUT_INTO
    with contextlib.ExitStack() as stack:
        for name, put in put_into.items():
            # TensorFlow comes first, and imports the Keras that is `tf.keras`.
            if name in sys.modules and name not in _reached:
                put(stack)
                _reached.add(name)
                stack.callback(_reached.remove, name)
        return Installation(stack)

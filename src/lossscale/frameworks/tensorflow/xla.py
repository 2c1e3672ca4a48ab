"""Whether the function that is being traced will be compiled by XLA."""

from __future__ import annotations

import tensorflow as tf

from lossscale.frameworks.tensorflow.private_names import is_in_xla


def in_xla() -> bool:
    """Whether a function with `jit_compile=True` is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(is_in_xla(tf.compat.v1.get_default_graph()))

"""What is being traced: whether XLA will compile it, and what users wrote that we call there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale.tensorflow.private_names import control_status_ctx, is_in_xla, tf_convert


def in_xla() -> bool:
    """Whether a function with `jit_compile=True` is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(is_in_xla(tf.compat.v1.get_default_graph()))


def translated(function: Callable[..., Any], *, by_default: bool = False) -> Callable[..., Any]:
    """Returns a callable of the user's, with Python branches on tensors in it turned into graphs.

    AutoGraph translates what it meets in a translated function, and ours are none
    (`common/autograph.py`).

    Args:
        function: The callable.
        by_default: Whether to translate it where no translated function has called us.
    """
    if tf.executing_eagerly():
        return function
    found: Callable[..., Any] = tf_convert(
        function, control_status_ctx(), convert_by_default=by_default
    )
    return found

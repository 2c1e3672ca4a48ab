"""What users wrote and this library calls, translated as where they called this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale.frameworks.tensorflow.private_names import control_status_ctx, tf_convert


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

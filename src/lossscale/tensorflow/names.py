"""The places where TensorFlow's pages have the names of loss scaling."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from lossscale.common.monkeypatch import (
    DocumentedNames,
    put_into_mixed_precision,
    replace,
    submodule,
)
from lossscale.errors import UnsupportedError
from lossscale.tensorflow import private_names


def put_in_place(names: DocumentedNames) -> contextlib.ExitStack:
    """Sets every documented name under `tf`.

    Returns:
        A stack that puts back what was there before when it is closed.
    """
    with contextlib.ExitStack() as stack:
        # tf_keras has its policies in its names for TensorFlow 2 only.
        policies = tf.keras.mixed_precision
        for root in (tf, tf.compat.v1, tf.compat.v2):
            put_into_mixed_precision(stack, root.keras.mixed_precision, names, policies)
            mixed_precision = submodule(stack, root, "mixed_precision")
            experimental = [
                submodule(stack, parent, "experimental") for parent in (mixed_precision, root.train)
            ]
            for module in experimental:
                _put_loss_scales(stack, module, names.loss_scales)
        # Where TensorFlow has had them since 2.4.
        _put_loss_scales(stack, tf.compat.v1.mixed_precision, names.loss_scales)
        own = private_names.own_loss_scales()
        replace(stack, own, "get", _with_ours(own, names.loss_scales))
        # `from tensorflow.keras.mixed_precision import ...` finds another module than the
        # attribute access above.
        imported = importlib.import_module("tensorflow.keras.mixed_precision")
        put_into_mixed_precision(stack, imported, names, policies)
        return stack.pop_all()


def _put_loss_scales(
    stack: contextlib.ExitStack, module: Any, loss_scales: Sequence[type[Any]]
) -> None:
    for loss_scale in loss_scales:
        replace(stack, module, loss_scale.__name__, loss_scale)


def _with_ours(own: Any, loss_scales: Sequence[type[Any]]) -> Callable[[Any], Any]:
    """Returns TensorFlow's function that reads a loss scale, which then understands these too."""
    get = own.get

    def get_either(identifier: Any) -> Any:
        if not isinstance(identifier, tuple(loss_scales)):
            return get(identifier)
        if type(identifier) not in loss_scales:
            raise UnsupportedError(
                f"TensorFlow's own loss scale optimizer cannot use a {type(identifier).__name__}: "
                "under lossscale.install() it takes numbers, 'dynamic', FixedLossScale and "
                "DynamicLossScale. Define the class while nothing is installed."
            )
        counterpart = getattr(own, type(identifier).__name__)
        return counterpart(**cast(Any, identifier).get_config())

    return get_either

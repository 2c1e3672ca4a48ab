"""Random numbers that do not depend on the precision that a layer computes in.

Frameworks draw float16 numbers otherwise than float32 ones, from the same seed: dropout would hide
other elements in float16 than in its reference, and the two could not be compared.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from lossscale.keras.private_names import random_functions
from lossscale.keras_common.passes import NARROW, replaced

_SAMPLERS = ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial")


@contextlib.contextmanager
def drawn_in_float32() -> Iterator[None]:
    """Within it all random numbers of Keras are drawn in float32, and cast."""
    module = random_functions
    with contextlib.ExitStack() as stack:
        for name in _SAMPLERS:
            stack.enter_context(replaced(module, name, _sampler(getattr(module, name))))
        stack.enter_context(replaced(module, "dropout", _dropout(module.dropout)))
        yield


def _sampler(draw: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(draw)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        dtype = given.arguments.get("dtype")
        if dtype is None or keras.backend.standardize_dtype(dtype) not in NARROW:
            return draw(*args, **kwargs)
        given.arguments["dtype"] = "float32"
        return keras.ops.cast(draw(*given.args, **given.kwargs), dtype)

    return drawn


def _dropout(drop: Callable[..., Any]) -> Callable[..., Any]:
    def dropped(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if dtype not in NARROW:
            return drop(inputs, rate, noise_shape, seed)
        kept = drop(keras.ops.ones_like(inputs, dtype="float32"), rate, noise_shape, seed)
        # An infinity that is dropped is none.
        zeros = keras.ops.zeros_like(inputs)
        return keras.ops.where(kept != 0, inputs * keras.ops.cast(kept, dtype), zeros)

    return dropped

"""Gradients with respect to variables and to tensors inside a model: a module for each backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras

from lossscale.diagnostics.exponents import ExponentTable
from lossscale.diagnostics.measurement import NARROW, Derived
from lossscale.diagnostics.tapping import Tap
from lossscale.keras import backends

Loss = Callable[[Sequence[tuple[Any, Any]], Any, Tap], Any]
"""Given (variable, value) pairs, a batch and a tap, returns the loss."""


class Counting(Protocol):
    """What a diagnosis needs of a backend of Keras: each is a module with these."""

    def random_state_kept(self) -> contextlib.AbstractContextManager[None]:
        """Within it random numbers are drawn, and the framework's own state stays as it was."""

    def differentiator(
        self,
        loss_of: Loss,
        variables: Sequence[Any],
        fixed: Sequence[Any],
        *,
        wide: bool,
        tapped: bool,
    ) -> Callable[[Any, float], list[Derived]]:
        """Returns what takes a batch and a scale, and gives the gradients of the scaled loss."""

    def count(self, gradient: Any) -> ExponentTable:
        """Returns the table of exponents of a gradient, on the host."""

    def on_host(self, gradient: Any) -> Any:
        """Returns a gradient as a NumPy array."""


if TYPE_CHECKING:
    from lossscale.keras.backends import (
        jax_counting,
        tensorflow_counting,
        torch_counting,
    )

    _JAX: Counting = jax_counting
    _TENSORFLOW: Counting = tensorflow_counting
    _TORCH: Counting = torch_counting


def load() -> Counting:
    """Returns the module of Keras' backend."""
    module: Counting = backends.module_for("counting")
    return module


def value_of(variable: Any, wide: bool) -> Any:
    """Returns the value of a Keras variable as a tensor, if `wide` in float32 or wider."""
    narrow = keras.backend.standardize_dtype(variable.dtype) in NARROW
    value = keras.ops.convert_to_tensor(variable.value)
    return keras.ops.cast(value, "float32") if narrow and wide else value

"""The gradients of a loss in float32 and in float16, each by one compiled function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.diagnostics.measurement import Derived
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.frameworks.jax import arrays
from lossscale.frameworks.jax.optax.noting import named_leaves

CALL = "loss_fn(params, batch, dtype)"
"""How the function of the user is called."""


class Differentiation:
    """Derives a loss, in float32 or wider and in float16.

    Args:
        loss_fn: Given the parameters, a batch and a dtype, returns the loss.
        params: The parameters, of any structure.
        reference: The dtype of the reference.
        grad: What differentiates, as `jax.value_and_grad` does; None for that.
        has_aux: Whether `loss_fn` returns a pair of the loss and anything else.

    Attributes:
        params: The parameters; others of the same structure may take their place.
        names: The names of the arrays that there are gradients by, in order; of the first batch.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        reference: Any,
        grad: Callable[..., Any] | None,
        has_aux: bool,
    ) -> None:
        self._loss_fn, self.params, self._has_aux = loss_fn, params, has_aux
        self._reference_dtype, self._grad = reference, grad
        self._compiled: dict[Any, Any] = {}
        self.names: list[str] = []

    def prepare(self, data: Any) -> None:
        """Checks the first batch, and finds the names of the gradients.

        Raises:
            ArgumentError: If there is nothing to derive by, or `loss_fn` returns no loss, or knows
                nothing of float16. It is a `ValueError`.
            ArgumentTypeError: If it returns something else. It is a `TypeError`.
        """
        wide = self._traced(data, self._reference_dtype)
        # In the order of the gradients, which are no parameters where something else derives.
        self.names = [name for name, _ in named_leaves(wide.out_info)]
        if not self.names:
            raise ArgumentError(
                "There is nothing to train in `params`: no array of floating-point numbers."
            )
        try:
            narrow = str(self._traced(data, jnp.float16).jaxpr)
        except Exception:
            # It will be seen when it is run.
            return
        if "f16[" not in narrow.replace("bf16[", ""):
            raise ArgumentError(
                f"`{CALL}` computes nothing in float16 when dtype is float16. Cast the parameters "
                "and the batch to dtype in it, or make the model with it, such as Net(dtype=dtype)."
            )

    def reference(self, batch: Any, scale: float) -> list[Derived]:
        """Returns the gradients of the scaled loss in the dtype of the reference."""
        return self._derived(batch[0], scale, self._reference_dtype)

    def in_float16(self, batch: Any, scale: float) -> list[Derived]:
        """Returns the gradients of the scaled loss as training in float16 has them."""
        return self._derived(batch[0], scale, jnp.float16)

    def _derived(self, data: Any, scale: float, dtype: Any) -> list[Derived]:
        function, traced = self._function(data, dtype)
        found = named_leaves(function(traced, jnp.float32(scale)))
        return [Derived(number, leaf.dtype.name, leaf, 0) for number, (_, leaf) in enumerate(found)]

    def _traced(self, data: Any, dtype: Any) -> Any:
        function, traced = self._function(data, dtype)
        return function.trace(traced, jnp.float32(1))

    def _function(self, data: Any, dtype: Any) -> tuple[Any, list[Any]]:
        """Returns a compiled function and the arrays that it takes.

        What is no array, such as the activation functions in a model of Equinox, is part of the
        function.
        """
        leaves, structure = jax.tree.flatten((self.params, data))
        there = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
        traced = [leaf for leaf, is_array in zip(leaves, there, strict=True) if is_array]
        fixed = [None if is_array else leaf for leaf, is_array in zip(leaves, there, strict=True)]
        key = (dtype, structure, tuple(map(repr, fixed)))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._gradients_of(structure, there, fixed, dtype))
        return self._compiled[key], traced

    def _gradients_of(
        self, structure: Any, there: list[bool], fixed: list[Any], dtype: Any
    ) -> Callable[..., Any]:
        is_reference = dtype == self._reference_dtype

        def gradients(traced: list[Any], scale: Any) -> Any:
            waiting = iter(traced)
            leaves = [
                (_widened(next(waiting), dtype) if is_reference else next(waiting))
                if is_array
                else leaf
                for is_array, leaf in zip(there, fixed, strict=True)
            ]
            params, data = jax.tree.unflatten(structure, leaves)

            def scaled_loss(params: Any, data: Any) -> Any:
                result = self._loss_fn(params, data, dtype)
                return arrays.scaled(_checked_loss(result, self._has_aux), scale)

            if self._grad is None:
                derive = jax.value_and_grad(scaled_loss, allow_int=True)
            else:
                derive = self._grad(scaled_loss)
            return derive(params, data)[1]

        return gradients


def check_function(loss_fn: Any) -> None:
    """Checks that a function can be called as it will be.

    Raises:
        ArgumentTypeError: If it cannot. It is a `TypeError`.
    """
    if callable(loss_fn):
        try:
            inspect.signature(loss_fn).bind(None, None, None)
        except TypeError:
            pass
        except ValueError:
            # Of some functions nothing is known.
            return
        else:
            return
    raise ArgumentTypeError(
        f"`loss_fn` must be a function that is called as {CALL}: it computes the loss in the dtype "
        f"that it is given, float16 or the reference's. Received: {loss_fn!r}."
    )


def _checked_loss(result: Any, has_aux: bool) -> Any:
    wanted = "`loss_fn` must return the loss, a scalar of floating-point numbers"
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise ArgumentTypeError(
                f"With has_aux=True `loss_fn` must return a pair of the loss and anything else. "
                f"Received: a {type(result).__name__}."
            )
        result = result[0]
    elif isinstance(result, (tuple, list, dict)):
        raise ArgumentTypeError(
            f"{wanted}. Received: a {type(result).__name__}. Add several losses up; of a pair "
            "(loss, anything) say has_aux=True."
        )
    try:
        loss = jnp.asarray(result)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{wanted}. Received: a {type(result).__name__}.") from None
    if loss.shape:
        raise ArgumentError(
            f"{wanted}. Received: an array of shape {loss.shape}. Take the mean or the sum."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ArgumentError(f"{wanted}. Received: an array of dtype {loss.dtype.name}.")
    return loss


def _widened(leaf: Any, dtype: Any) -> Any:
    narrower = jnp.issubdtype(leaf.dtype, jnp.floating) and (
        leaf.dtype.itemsize < np.dtype(dtype).itemsize
    )
    return leaf.astype(dtype) if narrower else leaf

"""The gradients of a loss in float32 and in float16, each by one compiled function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.diagnostics.measurement import Derived
from lossscale.diagnostics.tapping import ACTIVATION
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax import scaling
from lossscale.optax.diagnosis import tapping
from lossscale.optax.noting import named_leaves

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
        looks_inside: Whether to derive by values on the way too.

    Attributes:
        params: The parameters; others of the same structure may take their place.
        names: The names of the arrays that there are gradients by, in order; of the first batch.
        named_inside: The names of the values on the way that there are gradients by.
        hidden: The names of those that no gradient gets out from.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        reference: Any,
        grad: Callable[..., Any] | None,
        has_aux: bool,
        *,
        looks_inside: bool = True,
    ) -> None:
        self._looks_inside = looks_inside
        self._loss_fn, self.params, self._has_aux = loss_fn, params, has_aux
        self._reference_dtype, self._grad = reference, grad
        self._compiled: dict[Any, Any] = {}
        self.names: list[str] = []
        self.named_inside: list[str] = []
        self.hidden: tuple[str, ...] = ()

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
        # Most losses name nothing, and are not traced again.
        if self._looks_inside and any(tapping.named_values(wide.jaxpr)):
            self._find_inside(data)
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
        """Returns the gradients of the scaled loss in the dtype of the reference.

        At a scale of 1, which is not scaled, by what has a name on the way too.
        """
        derived = self._derived(batch[0], scale, self._reference_dtype)
        return derived + self._derived_inside(batch[0]) if scale == 1 else derived

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
        """Returns a compiled function and the arrays that it takes."""
        form, traced = _Form.of((self.params, data))
        key = (dtype, form.key)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._gradients_of(form, dtype))
        return self._compiled[key], traced

    def _gradients_of(self, form: _Form, dtype: Any) -> Callable[..., Any]:
        def gradients(traced: list[Any], scale: Any) -> Any:
            def scaled_loss(params: Any, data: Any) -> Any:
                return scaling.scaled(self._loss(params, data, dtype), scale)

            if self._grad is None:
                derive = jax.value_and_grad(scaled_loss, allow_int=True)
            else:
                derive = self._grad(scaled_loss)
            return derive(*form.filled(traced, self._wider_than(dtype)))[1]

        return gradients

    def _loss(self, params: Any, data: Any, dtype: Any) -> Any:
        return _checked_loss(self._loss_fn(params, data, dtype), self._has_aux)

    def _wider_than(self, dtype: Any) -> Any:
        return dtype if dtype == self._reference_dtype else None

    # --- Inside ----------------------------------------------------------------------------------

    def _find_inside(self, data: Any) -> None:
        form, traced = _Form.of((self.params, data))
        try:
            inside, self.hidden = tapping.named_values(self._traced_loss(form, traced))
        except Exception:
            # It may be that only what derives it can call it.
            return
        self.named_inside = list(inside)

    def _traced_loss(self, form: _Form, traced: list[Any]) -> Any:
        """The jaxpr of the loss in the dtype of the reference."""
        dtype = self._reference_dtype

        def loss(traced: list[Any]) -> Any:
            params, data = form.filled(traced, dtype)
            return self._loss(params, data, dtype)

        return jax.make_jaxpr(loss)(traced)

    def _derived_inside(self, data: Any) -> list[Derived]:
        if not self.named_inside:
            return []
        form, traced = _Form.of((self.params, data))
        key = ("inside", form.key)
        if key not in self._compiled:

            def gradients(traced: list[Any]) -> Any:
                return tapping.gradients(self._traced_loss(form, traced), traced)

            self._compiled[key] = jax.jit(gradients)
        found = self._compiled[key](traced)
        return [
            Derived(ACTIVATION + name, found[name].dtype.name, found[name], 0)
            for name in self.named_inside
            if name in found
        ]


class _Form(NamedTuple):
    """A tree without its arrays.

    What is no array, such as the activation functions in a model of Equinox, is part of the
    functions that are compiled.

    Attributes:
        structure: That of the tree.
        there: For each leaf, whether it is an array.
        fixed: The leaves that are none.
    """

    structure: Any
    there: list[bool]
    fixed: list[Any]

    @classmethod
    def of(cls, tree: Any) -> tuple[_Form, list[Any]]:
        """Returns the form of a tree, and its arrays."""
        leaves, structure = jax.tree.flatten(tree)
        there = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
        traced = [leaf for leaf, is_array in zip(leaves, there, strict=True) if is_array]
        fixed = [None if is_array else leaf for leaf, is_array in zip(leaves, there, strict=True)]
        return cls(structure, there, fixed), traced

    @property
    def key(self) -> Any:
        """What is equal for forms that one compiled function serves."""
        return self.structure, tuple(map(repr, self.fixed))

    def filled(self, arrays: Sequence[Any], dtype: Any) -> Any:
        """Returns the tree with arrays in it, widened to a dtype unless that is None."""
        waiting = iter(arrays)
        leaves = [
            (next(waiting) if dtype is None else _widened(next(waiting), dtype))
            if is_array
            else leaf
            for is_array, leaf in zip(self.there, self.fixed, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


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

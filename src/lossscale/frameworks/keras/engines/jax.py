"""JAX: state is passed in and out, inside `jax.jit` as outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import BCOO

from lossscale.errors import UnsupportedError
from lossscale.frameworks.convention import Place
from lossscale.frameworks.finite import jax as finite_check
from lossscale.frameworks.keras.engines.common import (
    aggregation_name,
    check_strategy,
    known,
    outside_traces,
)
from lossscale.frameworks.keras.engines.common import flat_keras_variables as flat_variables
from lossscale.frameworks.keras.engines.common import is_keras_variable as is_variable

__all__ = [
    "aggregation_name",
    "check_strategy",
    "current_place",
    "flat_variables",
    "is_variable",
    "known",
    "outside_traces",
]

namespace = keras.ops


def current_place() -> Place:
    """What stands for the function that is being compiled, None outside of one."""
    return Place(getattr(_traced_zero(), "_trace", None), replicas=(0,))


def _traced_zero() -> Any:
    # While a function is compiled, every operation is traced, also one on constants.
    return jnp.zeros(()) + 0


def read(variable: Any) -> Any:
    """The value of a Keras variable now, as an array."""
    return jnp.asarray(variable.value)


def unscaled(gradients: Sequence[Any], scale: Any, exact_reciprocal: bool) -> list[Any]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Arrays or `BCOO` of any dtype, or None. Sparse stays sparse.
        scale: float32 scalar array, or a Python float.
        exact_reciprocal: Whether multiplying by the reciprocal is exact. It is for powers of
            two; others are divided by.
    """
    _check_not_baked_in(scale)

    def divided(gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, BCOO):
            return BCOO((divided(gradient.data), gradient.indices), shape=gradient.shape)
        gradient = _widened(gradient)
        divisor = jnp.asarray(scale, gradient.dtype)
        return gradient * (1.0 / divisor) if exact_reciprocal else gradient / divisor

    return [divided(gradient) for gradient in gradients]


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    _check_not_baked_in(scale)
    loss = _widened(loss)
    return loss * jnp.asarray(scale, loss.dtype)


def _check_not_baked_in(scale: Any) -> None:
    """Raises if a variable's value would become a constant of a function being compiled."""
    if not isinstance(scale, jax.Array) or isinstance(scale, jax.core.Tracer):
        return
    if isinstance(_traced_zero(), jax.core.Tracer):
        raise UnsupportedError(
            "Inside a function that jax.jit compiles, the loss scale must come in as an argument; "
            "read from the optimizer's variable it would stay what it is now. Call scale_loss() "
            "in keras.StatelessScope(state_mapping=zip(optimizer.variables, values)), and apply "
            "gradients with stateless_apply(values, ...)."
        )


def _usable_in_branches(scale: Any, gradients: Sequence[Any]) -> Any:
    """Returns the scale as a number if it is known and the step is traced (`jax.vmap`).

    A branch traces what is inside it, so that there a known scale looks as in a compiled function.
    """
    _check_not_baked_in(scale)
    known = isinstance(scale, jax.Array) and not isinstance(scale, jax.core.Tracer)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(list(gradients)))
    return np.asarray(scale) if known and traced else scale


def cast(gradient: Any, dtype: str) -> Any:
    """Returns a gradient, dense or sparse, in another dtype."""
    return gradient.astype(dtype)


def _widened(array: Any) -> Any:
    array = jnp.asarray(array)
    wide = array.dtype == jnp.float64 or jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array if wide else array.astype(jnp.float32)


def all_finite(gradients: Sequence[Any], scale: Any = None, exact_reciprocal: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled.

    Args:
        gradients: Arrays, `BCOO` (their data are looked at) or None (skipped).
        scale: What they will be divided by; None if they are unscaled already.
        exact_reciprocal: As for `unscaled`.

    Returns:
        A boolean scalar array.
    """
    if scale is None:
        return finite_check.all_finite(gradients)
    return finite_check.all_finite(
        gradients, lambda part: unscaled([part], scale, exact_reciprocal)[0], scale < 1.0
    )


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, without None."""
    leaves: list[Any] = jax.tree.leaves(gradients, is_leaf=lambda leaf: isinstance(leaf, BCOO))
    return leaves


def replica_count() -> int:
    """Always 1: under JAX one program sees all devices."""
    return 1


def run_step(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any, aggregate: bool
) -> None:
    """Unscales and applies gradients or skips the step.

    Args:
        optimizer: The loss scale optimizer, built.
        gradients: Those of the step; None where there is none.
        variables: Their variables.
        scale: What the gradients have to be divided by; None if they are unscaled already.
        aggregate: Not used: gradients of a sharded program are summed where they arise.
    """
    inner = optimizer.inner_optimizer
    scale = _usable_in_branches(scale, gradients)
    finite = optimizer._judge(gradients, variables, scale)
    if optimizer._watch is not None:
        optimizer._note(gradients, variables, scale, finite, is_shared=True)

    def apply() -> None:
        inner.apply(optimizer._for_inner(gradients, variables, scale), list(variables))

    if isinstance(finite, jax.core.Tracer):
        _apply_if_traced(finite, inner, apply, variables)
    elif bool(finite):
        apply()
    optimizer._move_scale(finite)


def _apply_if_traced(
    finite: Any, inner: Any, apply: Callable[[], None], variables: Sequence[Any]
) -> None:
    trained = inner._trainable_variables
    targets = list({id(v): v for v in (*inner.variables, *trained, *variables)}.values())
    values = [target.value for target in targets]

    def applied(values: Sequence[Any]) -> list[Any]:
        mapping = list(zip(targets, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            apply()
        return [scope.get_current_value(target) for target in targets]

    # A branch, and not a choice between old and new values for every variable: with donated
    # buffers XLA would copy the old ones first.
    for target, value in zip(targets, jax.lax.cond(finite, applied, list, values), strict=True):
        target.assign(value)


def new_watch(histograms_every: int | None, new_variable: Callable[..., Any]) -> Any:
    """Returns what notes steps for a monitor.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a Keras variable of a name, a dtype and a shape, with zeros in it.
    """
    from lossscale.frameworks.watches.jax import Watch

    return Watch(histograms_every, new_variable)


def differentiate(
    loss: Any,
    variables: Any,
    scale: Callable[[Any], Any],
    *,
    tape: Any = None,
    grad_loss: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Raises: JAX differentiates functions of arrays, not of variables."""
    raise UnsupportedError(
        "On the JAX backend the gradients of a loss are taken with jax.grad, with the variables' "
        "values as arguments, and applied with stateless_apply(). minimize(), get_gradients() "
        "and get_updates() work on the TensorFlow and PyTorch backends."
    )


symbolic_gradients = differentiate

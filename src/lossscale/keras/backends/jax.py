"""JAX: state is passed in and out, inside `jax.jit` as outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lossscale.common.handover import Place
from lossscale.common.notes import NotesOfVariables, StepNotes
from lossscale.errors import UnsupportedError
from lossscale.jax import arrays, magnitudes
from lossscale.jax.arrays import flat_gradients
from lossscale.jax.finite import all_finite
from lossscale.keras.backends.common import (
    aggregation_name,
    check_strategy,
    known,
    outside_traces,
)
from lossscale.keras.backends.common import flat_keras_variables as flat_variables
from lossscale.keras.backends.common import is_keras_variable as is_variable
from lossscale.keras.state import Ledger
from lossscale.keras.step import Arrays, Step

__all__ = [
    "aggregation_name",
    "all_finite",
    "cast",
    "check_strategy",
    "current_place",
    "differentiate",
    "flat_gradients",
    "flat_variables",
    "is_variable",
    "known",
    "namespace",
    "new_notes",
    "outside_traces",
    "read",
    "replica_count",
    "run_step",
    "scaled",
    "symbolic_gradients",
    "unscaled",
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


def unscaled(gradients: Sequence[Any], scale: Any, powers_of_two: bool) -> list[Any]:
    """Divides gradients by the scale; see `arrays.unscaled`."""
    _check_not_baked_in(scale)
    return arrays.unscaled(gradients, scale, powers_of_two)


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    _check_not_baked_in(scale)
    return arrays.scaled(loss, scale)


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


def replica_count() -> int:
    """Always 1: under JAX one program sees all devices."""
    return 1


_ARRAYS = Arrays(unscaled, all_finite, cast)


def run_step(step: Step, inner: Any, ledger: Ledger, notes: StepNotes | None) -> None:
    """Unscales and applies gradients or skips the step.

    Args:
        step: The step; gradients of a sharded program are summed where they arise.
        inner: The inner optimizer, built.
        ledger: What the step moves besides.
        notes: What a monitor wants noted, or None.
    """
    if step.are_scaled:
        step = step._replace(scale=_usable_in_branches(step.scale, step.gradients))
    finite = step.is_finite(_ARRAYS)
    seen = step.seen(magnitudes.seen, finite)
    if notes is not None:
        number = read(ledger.iterations) + 1
        notes.note(step.decided(_ARRAYS, finite, number, is_shared=True))

    def apply() -> None:
        inner.apply(step.for_inner(inner, _ARRAYS), step.variables)

    if isinstance(finite, jax.core.Tracer):
        _apply_if_traced(finite, inner, apply, step.variables)
    elif bool(finite):
        apply()
    ledger.move(seen)


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


def new_notes(histograms_every: int | None, new_variable: Callable[..., Any]) -> NotesOfVariables:
    """Returns what notes steps for a monitor.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a Keras variable of a name, a dtype and a shape, with zeros in it.
    """
    from lossscale.jax.notes import Notes

    return Notes(histograms_every, new_variable)


def differentiate(
    loss: Any,
    variables: Any,
    scale: Callable[[Any], Any],
    *,
    tape: Any = None,
    grad_loss: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Raises: JAX differentiates functions of arrays, not of variables."""
    raise _no_gradients()


def symbolic_gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    """Raises: an array does not know how it was computed."""
    raise _no_gradients()


def _no_gradients() -> UnsupportedError:
    return UnsupportedError(
        "On the JAX backend the gradients of a loss are taken with jax.grad, with the variables' "
        "values as arguments, and applied with stateless_apply(). minimize(), get_gradients() "
        "and get_updates() work on the TensorFlow and PyTorch backends."
    )

"""JAX: zeros are added to the tensors inside, and the loss is derived by them as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.diagnostics.exponents import ExponentTable
from lossscale.diagnostics.measurement import Derived
from lossscale.jax import exponents as histograms
from lossscale.keras.backends.counting import Loss, value_of

# On its own it is compiled once for each shape, of which a model has fewer than gradients.
_count_bins = jax.jit(histograms.count_bins)


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Does nothing: no state outside of the model is drawn from."""
    return contextlib.nullcontext()


def differentiator(
    loss_of: Loss, variables: Sequence[Any], fixed: Sequence[Any], *, wide: bool, tapped: bool
) -> Callable[[Any, float], list[Derived]]:
    """Returns what takes a batch and a scale, and gives the gradients of the scaled loss.

    Args:
        loss_of: Computes the loss.
        variables: The trainable Keras variables.
        fixed: The other variables of the model. As arguments they are no constants of the
            compiled program.
        wide: Whether to widen the values of variables in 16 bits to float32.
        tapped: Whether to derive by the tensors that are tapped as well.
    """
    described: list[tuple[int | str, str]] = []

    @jax.jit  # type: ignore[untyped-decorator]
    def compute(values: Any, fixed_values: Any, batch: Any, scale: Any) -> list[Any]:
        names: list[str] = []
        rest = list(zip(fixed, fixed_values, strict=True))

        def discover(values: Any) -> list[Any]:
            found: list[Any] = []

            def tap(name: str, tensor: Any) -> Any:
                names.append(name)
                found.append(tensor)
                return tensor

            loss_of([*zip(variables, values, strict=True), *rest], batch, tap)
            return found

        def loss(values: Any, probes: Any) -> Any:
            waiting = iter(probes)

            def tap(name: str, tensor: Any) -> Any:
                return tensor + next(waiting) if tapped else tensor

            pairs = [*zip(variables, values, strict=True), *rest]
            unscaled = loss_of(pairs, batch, tap)
            return unscaled * scale.astype(unscaled.dtype)

        shapes = jax.eval_shape(discover, values) if tapped else []
        probes = [jnp.zeros(found.shape, found.dtype) for found in shapes]
        sources: list[tuple[int | str, Any]] = [*enumerate(values)]
        sources += zip(names, probes, strict=True)
        described[:] = [(key, array.dtype.name) for key, array in sources]
        by_value, by_probe = jax.grad(loss, argnums=(0, 1))(values, probes)
        return [*by_value, *by_probe]

    def derive(batch: Any, scale: float) -> list[Derived]:
        values = [value_of(variable, wide) for variable in variables]
        fixed_values = [variable.value for variable in fixed]
        found = compute(values, fixed_values, batch, jnp.float32(scale))
        return [Derived(*each, g, 0) for each, g in zip(described, found, strict=True)]

    return derive


def count(gradient: Any) -> ExponentTable:
    """Returns the table of exponents of a gradient, on the host."""
    return histograms.on_host(_count_bins(gradient))


def on_host(gradient: Any) -> Any:
    """Returns a gradient as a NumPy array."""
    return np.asarray(gradient)

"""JAX: zeros are added to the tensors inside, and the loss is derived by them as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.diagnostics.measurement import Counted
from lossscale.frameworks.jax import exponents as histograms
from lossscale.frameworks.keras.backends.counting import Loss, wide_value

# On its own it is compiled once for each shape, of which a model has fewer than gradients.
_count_bins = jax.jit(histograms.count_bins)


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Does nothing: no state outside of the model is drawn from."""
    return contextlib.nullcontext()


def counter(
    loss_of: Loss, variables: Sequence[Any], fixed: Sequence[Any]
) -> Callable[[Any], list[Counted]]:
    """Returns what takes a batch and counts the gradients of the loss on it.

    Args:
        loss_of: Computes the loss.
        variables: The trainable Keras variables.
        fixed: The other variables of the model. As arguments they are no constants of the
            compiled program.
    """
    described: list[tuple[int | str, str]] = []

    @jax.jit  # type: ignore[untyped-decorator]
    def compute(values: Any, fixed_values: Any, batch: Any) -> list[Any]:
        names: list[str] = []
        rest = list(zip(fixed, fixed_values, strict=True))

        def discover(values: Any) -> list[Any]:
            tapped: list[Any] = []

            def tap(name: str, tensor: Any) -> Any:
                names.append(name)
                tapped.append(tensor)
                return tensor

            loss_of([*zip(variables, values, strict=True), *rest], batch, tap)
            return tapped

        def loss(values: Any, probes: Any) -> Any:
            waiting = iter(probes)
            pairs = [*zip(variables, values, strict=True), *rest]
            return loss_of(pairs, batch, lambda name, tensor: tensor + next(waiting))

        shapes = jax.eval_shape(discover, values)
        probes = [jnp.zeros(found.shape, found.dtype) for found in shapes]
        sources: list[tuple[int | str, Any]] = [*enumerate(values)]
        sources += zip(names, probes, strict=True)
        described[:] = [(key, array.dtype.name) for key, array in sources]
        by_value, by_probe = jax.grad(loss, argnums=(0, 1))(values, probes)
        return [*by_value, *by_probe]

    values = [wide_value(variable) for variable in variables]
    fixed_values = [variable.value for variable in fixed]

    def count(batch: Any) -> list[Counted]:
        found = compute(values, fixed_values, batch)
        return [
            Counted(*each, histograms.on_host(_count_bins(gradient)))
            for each, gradient in zip(described, found, strict=True)
        ]

    return count

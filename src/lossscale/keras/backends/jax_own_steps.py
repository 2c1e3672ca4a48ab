"""JAX: a function of the state, in a scope that takes what the step assigns to variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lossscale.diagnostics.measurement import Derived
from lossscale.diagnostics.tapping import replaced
from lossscale.jax.scaling import scaled, unscaled
from lossscale.keras.backends.own_steps import dtype_of


def runner(
    step: Callable[..., Any],
    new_recorder: Callable[..., Any],
    model: Any,
    optimizers: Sequence[Any],
    *,
    eager: bool,
    helped: bool,
) -> Callable[[Any, float], tuple[list[Derived], Any]]:
    """Returns what takes data and a scale, and gives the gradients that a step is taken with.

    Args:
        step: Runs the `train_step` with a recorder, on a state and data.
        new_recorder: Makes a recorder for a scale and the values of the variables.
        model: The model.
        optimizers: Not used: only a state is assigned to.
        eager: Whether the model is trained without `jax.jit`.
        helped: Whether to scale the loss of a step that does not do so itself.
    """
    del optimizers
    of_optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
    state = [
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        of_optimizer,
        list(model.metrics_variables),
    ]
    recorders: list[Any] = []

    def compute(values: Any, data: Any, scale: Any) -> list[Any]:
        recorder = new_recorder(scale, values[0])
        pairs = [
            pair
            for several, found in zip(state, values, strict=True)
            for pair in zip(several, found, strict=True)
        ]
        scaling = _scaling_derivatives(recorder) if helped else contextlib.nullcontext()
        scope = keras.StatelessScope(
            state_mapping=pairs, collect_losses=True, initialize_variables=False
        )
        with scope, scaling:
            step(recorder, tuple(values), data)
        found = [_together(given) for given in recorder.given]
        recorder.let_go()
        recorders[:] = [recorder]
        return found

    function = compute if eager else jax.jit(compute)

    def run(data: Any, scale: float) -> tuple[list[Derived], Any]:
        values = [[variable.value for variable in several] for several in state]
        found = function(values, data, jnp.float32(scale))
        derived = [
            Derived(place, dtype_of(variable), gradient, 0)
            for place, (variable, gradient) in enumerate(zip(state[0], found, strict=True))
        ]
        return derived, recorders[0]

    return run


@contextlib.contextmanager
def _scaling_derivatives(recorder: Any) -> Iterator[None]:
    """Within it gradients are taken of a scaled loss, and divided."""
    take = jax.value_and_grad
    inside: list[bool] = []

    def value_and_grad(
        fun: Callable[..., Any],
        argnums: Any = 0,
        has_aux: bool = False,
        **named: Any,
    ) -> Callable[..., Any]:
        def larger(*args: Any, **kwargs: Any) -> Any:
            inside.append(True)
            try:
                found = fun(*args, **kwargs)
            finally:
                inside.pop()
            return scaled(found[0] if has_aux else found, recorder.scale), found

        plain = take(fun, argnums, has_aux, **named)
        of_larger = take(larger, argnums, True, **named)

        def derived(*args: Any, **kwargs: Any) -> Any:
            if inside:
                # Of a penalty, which is a part of the loss.
                return plain(*args, **kwargs)
            recorder.helped += 1
            (_, found), gradients = of_larger(*args, **kwargs)
            leaves, structure = jax.tree.flatten(gradients)
            divided = unscaled(leaves, recorder.scale, True)
            return found, jax.tree.unflatten(structure, divided)

        return derived

    def grad(
        fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **named: Any
    ) -> Callable[..., Any]:
        both = value_and_grad(fun, argnums, has_aux, **named)

        def derived(*args: Any, **kwargs: Any) -> Any:
            found, gradients = both(*args, **kwargs)
            return (gradients, found[1]) if has_aux else gradients

        return derived

    with replaced(jax, "value_and_grad", value_and_grad), replaced(jax, "grad", grad):
        yield


def _together(given: Sequence[Any]) -> Any:
    """The gradients of one variable as one array."""
    if len(given) < 2:
        return given[0] if given else None
    return jnp.concatenate([gradient.ravel() for gradient in given])

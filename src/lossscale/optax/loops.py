"""Functions for a training loop: the loss scale, the scaled loss, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

import lossscale.optax.gating as gating
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.jax.gradients import scaled
from lossscale.optax.scale_state import array_in
from lossscale.optax.state_lookup import state_in
from lossscale.packages import warn

P = ParamSpec("P")
R = TypeVar("R")
Tree = TypeVar("Tree")


def loss_scale(opt_state: object) -> Array:
    """Returns the loss scale of the next step.

    Args:
        opt_state: The state of a `loss_scaled` optimizer, or an object that holds it as
            `opt_state`, such as a `TrainState`.

    Returns:
        A float32 scalar array.

    Raises:
        ArgumentTypeError: If `opt_state` has no loss scale.
        ArgumentError: If another transformation is around `loss_scaled`.

    Examples:
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.1), initial_scale=8)
        >>> float(lossscale.optax.loss_scale(tx.init(jnp.ones(2))))
        8.0
    """
    return jnp.asarray(array_in(state_in(opt_state).loss_scale), jnp.float32)


def scale_loss(opt_state: object, loss: jax.typing.ArrayLike) -> Array:
    """Multiplies a loss by the loss scale, in float32 or wider.

    Differentiate the result, and pass the gradients to `update`.

    Args:
        opt_state: As for `loss_scale`.
        loss: A scalar of any floating-point dtype. Cast to float32 before the last sum or mean:
            backpropagation through a float16 loss starts with the scale in float16, which is
            infinite above 65504.

    Returns:
        An array of the same shape, float32 or wider.

    Raises:
        ArgumentTypeError, ArgumentError: As for `loss_scale`, and if the state holds several
            replicas or ensemble members.

    Examples:
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.1), initial_scale=8)
        >>> opt_state = tx.init(jnp.ones(2))
        >>> jax.grad(lambda w: lossscale.optax.scale_loss(opt_state, w.sum()))(jnp.ones(2))
        Array([8., 8.], dtype=float32)
    """
    return scaled(loss, _single_scale(opt_state))


def value_and_grad(
    fun: Callable[P, R],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    grad: Callable[..., Callable[..., tuple[ArrayTree, ArrayTree]]] = jax.value_and_grad,
    **options: Any,
) -> Callable[Concatenate[object, P], tuple[R, ArrayTree]]:
    """Like `jax.value_and_grad`, but differentiates the scaled loss.

    The new function takes the optimizer's state and then the arguments of `fun`. It returns the
    unscaled loss and the scaled gradients, which `update` takes.

    Args:
        fun: Returns the loss, a scalar; with `has_aux`, a pair of the loss and anything else.
        argnums: As in `jax.value_and_grad`; counts the arguments of `fun`.
        has_aux: As in `jax.value_and_grad`.
        grad: The function that differentiates: `jax.value_and_grad`, `flax.nnx.value_and_grad`,
            `equinox.filter_value_and_grad` or another with the same interface.
        options: Further arguments of `grad`.

    Returns:
        A function of (opt_state, \\*args, \\*\\*kwargs) that returns (loss, gradients), or
        ((loss, aux), gradients).

    Raises:
        ArgumentTypeError: If `fun` is not a function. The new function raises it if its first
            argument has no loss scale, or `fun` does not return (loss, aux) with `has_aux`.
        ArgumentError: The new function raises it as `scale_loss` does, and if the loss is an
            integer.

    Examples:
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5), initial_scale=8)
        >>> weight = jnp.float32(1.0)
        >>> opt_state = tx.init(weight)
        >>> loss, grads = lossscale.optax.value_and_grad(lambda w: w**2)(opt_state, weight)
        >>> float(loss), float(grads)
        (1.0, 16.0)
        >>> updates, opt_state = tx.update(grads, opt_state, weight)
        >>> float(optax.apply_updates(weight, updates))
        0.0
    """
    if not callable(fun):
        raise ArgumentTypeError(
            f"`fun` must be the loss function. Received: a {type(fun).__name__}. It is called as "
            "value_and_grad(loss_fn)(opt_state, params, ...)."
        )
    # Equinox has no `argnums`; it differentiates the first argument.
    chosen = {} if argnums == 0 else {"argnums": argnums}

    def value_and_scaled_grad(
        opt_state: object, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, ArrayTree]:
        scale = _single_scale(opt_state)

        def scaled_loss(*args: P.args, **kwargs: P.kwargs) -> tuple[Array, _Result]:
            result = fun(*args, **kwargs)
            loss = _loss_in(result, has_aux)
            # Return the loss itself: scaled and divided again, it could be infinite.
            return scaled(loss, scale), _Result(result)

        differentiated = grad(scaled_loss, has_aux=True, **chosen, **options)
        (_, result), gradients = differentiated(*args, **kwargs)
        return result.returned, gradients

    return value_and_scaled_grad


def unless_skipped(opt_state: object, new: Tree, old: Tree) -> Tree:
    """Returns what a step made of a tree, or the tree as it was if the step was skipped.

    For what the forward pass changes: the statistics of a batch normalization, an average, a
    counter. It does not wait for the device, and works inside `jax.jit` and `jax.lax.scan`.

    Args:
        opt_state: The state after `update`, as for `loss_scale`.
        new: A tree of arrays, after the step. Leaves that are not arrays are returned as they are.
        old: The same tree before the step. The state of a Flax NNX module changes with the module,
            so it must be a copy: `nnx.clone(nnx.state(model, nnx.BatchStat))`.

    Returns:
        A tree like `new`, with its dtypes.

    Raises:
        ArgumentTypeError, ArgumentError: As for `scale_loss`, and if the two trees, or shapes in
            them, differ.

    Examples:
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.1))
        >>> grads, opt_state = jnp.full(2, jnp.inf), tx.init(jnp.ones(2))
        >>> _, opt_state = tx.update(grads, opt_state)  # skipped
        >>> lossscale.optax.unless_skipped(opt_state, {"mean": jnp.nan}, {"mean": 0.5})
        {'mean': Array(0.5, dtype=float32, weak_type=True)}
    """
    skipped = state_in(opt_state).last_step_skipped
    _check_single(skipped, "decisions")
    if change := gating.form_change(old, new):
        raise ArgumentError(f"`new` and `old` must be trees of the same form. Received: {change}.")

    def chosen(new: ArrayTree, old: ArrayTree) -> ArrayTree:
        if new is old or not gating.is_array(new):
            return new
        dtype = jnp.result_type(new)
        old = old if jnp.result_type(old) == dtype else jnp.asarray(old, dtype)
        return jnp.where(skipped, old, new)

    leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    are_same = [one is other for one, other in leaves if gating.is_array(one)]
    if are_same and all(are_same):
        warn(
            "`new` and `old` are the same arrays, so a skipped step puts nothing back. The state "
            "of a Flax NNX module changes with the module. Take a copy of it before the step: "
            "nnx.clone(nnx.state(model, nnx.BatchStat))."
        )
    tree: Tree = jax.tree.map(chosen, new, old)
    return tree


class _Result(NamedTuple):
    """Marks a value that the user's function returned, to recognize it in the result of `grad`."""

    returned: ArrayTree


def _single_scale(opt_state: object) -> Array:
    scale = loss_scale(opt_state)
    _check_single(scale, "loss scales")
    return scale


def _check_single(value: Array, what: str) -> None:
    if jnp.ndim(value):
        raise ArgumentError(
            f"The state must have one loss scale. Received: {what} of shape {jnp.shape(value)}. "
            "Call this inside the vmap or pmap that the state belongs to."
        )


def _loss_in(result: Any, has_aux: bool) -> ArrayTree:
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    loss = result[0] if has_aux and is_pair else result
    if isinstance(loss, (tuple, list, dict)) or loss is None or (has_aux and not is_pair):
        raise ArgumentTypeError(
            "The differentiated function must return the loss, a scalar; with has_aux=True, (loss, "
            f"aux). Received: a {type(result).__name__}, with has_aux={has_aux}."
        )
    # JAX refuses other things that are not a scalar, and integers before they were scaled.
    if not jnp.issubdtype(jnp.result_type(loss), jnp.inexact):
        raise ArgumentError(
            "The loss must be a floating-point scalar. Received: dtype "
            f"{jnp.result_type(loss).name}."
        )
    return loss

"""Trains float16 parameters by float32 copies of them, in the state of a transformation."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax import Array

import lossscale.optax.gating as gating
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.optax.gating import GradientTransformationExtraArgs
from lossscale.optax.scale_state import LossScaleState
from lossscale.optax.state_lookup import nodes


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        masters: A float32 copy of each float16 or bfloat16 parameter; an `optax.MaskedNode` for
            each other one.
        inner_state: The state of the inner transformation, which updates the copies.
    """

    masters: ArrayTree
    inner_state: ArrayTree


def master_weights(
    inner: optax.GradientTransformation,
) -> GradientTransformationExtraArgs[MasterWeightsState]:
    """Makes a transformation update float32 copies of float16 and bfloat16 parameters.

    `optax.apply_updates` then gives each parameter its copy, rounded. An update that is too small
    for float16 is not lost: it stays in the copy. What other code writes into a parameter between
    two steps replaces the copy. Other parameters, such as float8 ones, are updated as without it.
    `update` cannot be differentiated, as in MAML: keep parameters in float32 for that.

    Put it directly inside loss scaling: `loss_scaled(master_weights(optax.adamw(1e-5)))`. Clipping,
    masks and accumulation go inside `master_weights`. bfloat16 parameters can do without
    `loss_scaled`.

    `optax.apply_updates` adds, so that a parameter never becomes -0.0, and an infinite one never
    finite again. If float32 does not hold the difference (a step across 0 to less than 1/8,192 of
    the parameter, 1/65,536 with bfloat16), the copy becomes the parameter.

    Args:
        inner: The whole optimizer, such as `optax.adamw(1e-5)` or a chain with clipping.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its state is a `MasterWeightsState`. Updates of
        parameters with a copy are float32. `update` needs the parameters.

    Raises:
        ArgumentTypeError: If `inner` is not an Optax transformation, or `update` gets no
            parameters.
        ArgumentError: If `inner` has loss scaling or copies itself (`init` raises it), or the
            dtypes of the parameters differ from those `init` got (`update` raises it).
        UnsupportedError: If `inner` is L-BFGS or has a line search (`init` raises it), or `update`
            is differentiated.

    Examples:
        >>> tx = lossscale.optax.master_weights(optax.sgd(1.0))
        >>> weight = jnp.float16(1.0)
        >>> state = tx.init(weight)
        >>> for _ in range(3):
        ...     updates, state = tx.update(jnp.float16(2**-12), state, weight)
        ...     weight = optax.apply_updates(weight, updates)
        >>> float(weight), float(state.masters)
        (0.9990234375, 0.999267578125)
    """
    masters = MasterWeights(gating.checked_transformation(inner))
    return GradientTransformationExtraArgs(masters.init, masters.update)


@dataclasses.dataclass(eq=False)
class MasterWeights:
    """The two functions of a transformation with float32 copies of parameters."""

    inner: optax.GradientTransformationExtraArgs

    def init(self, params: ArrayTree) -> MasterWeightsState:
        inner_state = self.inner.init(jax.tree.map(gating.widened_if_narrow, params))
        check_inner(inner_state, is_scaled=bool(nodes(inner_state, LossScaleState.__name__)))
        # Not those from above: no buffer is donated twice.
        masters = jax.tree.map(_master_of, params)
        return MasterWeightsState(masters, inner_state)

    def update(
        self,
        updates: ArrayTree,
        state: MasterWeightsState,
        params: ArrayTree = None,
        **extra_args: Any,
    ) -> tuple[ArrayTree, MasterWeightsState]:
        if params is None:
            raise ArgumentTypeError(
                "master_weights needs the parameters: call tx.update(grads, state, params)."
            )
        before = jax.tree.map(_current_master, params, state.masters)
        gradients = jax.tree.map(gating.widened_if_narrow, updates)
        made, inner_state = self.inner.update(gradients, state.inner_state, before, **extra_args)
        after = jax.tree.map(
            lambda p, m, u: _moved_jit(m, u) if _has_master(p) else optax.MaskedNode(),
            *(params, before, made),
        )
        return jax.tree.map(_change, params, after, made), MasterWeightsState(after, inner_state)


def check_inner(state: ArrayTree, is_scaled: bool = False) -> None:
    """Checks, by its state, a transformation that gets unscaled or widened gradients.

    Args:
        state: The state of the transformation.
        is_scaled: Whether it has loss scaling itself.

    Raises:
        ArgumentError: If it keeps float32 copies, or has loss scaling.
        UnsupportedError: If it searches along a line, or is L-BFGS.
    """
    if is_scaled or nodes(state, MasterWeightsState.__name__):
        raise ArgumentError(
            "master_weights must be used once, directly inside loss_scaled. Write "
            "loss_scaled(master_weights(optax.chain(...))): what else wraps it goes inside."
        )
    if found := nodes(state, *_SEARCHING):
        raise UnsupportedError(
            "Line searches and L-BFGS are not supported: they compare losses and gradients of "
            "several points. Train in float32, without loss_scaled and master_weights. Received: "
            f"an optimizer with a {type(found[0]).__name__}."
        )


_SEARCHING = (
    "ScaleByLBFGSState",
    "ScaleByBacktrackingLinesearchState",
    "ScaleByZoomLinesearchState",
)


def trains_float16(params: ArrayTree, state: ArrayTree) -> bool:
    """Whether a float16 parameter is trained for certain, as the state of a transformation shows.

    Args:
        params: The parameters. Those that are frozen may be `optax.MaskedNode`.
        state: The state of the transformation. A mask can be read from it only if there are arrays
            for each parameter, such as moments: those of others are `optax.MaskedNode`.
    """
    shapes = {
        path: leaf.shape
        for path, leaf in jax.tree.leaves_with_path(params)
        if getattr(leaf, "dtype", None) == jnp.float16
    }

    def shows_one(masked: ArrayTree) -> bool:
        leaves = jax.tree.leaves_with_path(masked)
        suffixes = ((path[start:], leaf) for path, leaf in leaves for start in range(len(path) + 1))
        return any(shapes.get(suffix) == getattr(leaf, "shape", 0) for suffix, leaf in suffixes)

    masked = nodes(state, "MaskedState", "PartitionState", "MultiTransformState")
    return bool(shapes) and all(map(shows_one, masked))


# --- What is done with each parameter -------------------------------------------------------------


def _has_master(param: ArrayTree) -> TypeGuard[Array]:
    """Whether a parameter is float16 or bfloat16, not a narrower float of a quantized model."""
    return gating.is_narrow(param) and param.dtype in (jnp.float16, jnp.bfloat16)


def _master_of(param: ArrayTree) -> ArrayTree:
    """Returns the float32 copy of a parameter, or an `optax.MaskedNode` if it needs none."""
    return gating.widened_if_narrow(param) if _has_master(param) else optax.MaskedNode()


def _current_master(param: ArrayTree, master: ArrayTree) -> ArrayTree:
    """Returns the copy, or the parameter if it is not the rounded copy or has none."""
    if _has_master(param) is isinstance(master, optax.MaskedNode):
        raise ArgumentError(
            "The dtypes of the parameters must be those that `init` was called with. Received: "
            f"{jnp.result_type(param)}. Apply updates with optax.apply_updates, which keeps "
            "dtypes, or call tx.init(params) again."
        )
    return _followed_jit(param, master) if _has_master(param) else gating.widened_if_narrow(param)


def _followed(param: Array, master: Array) -> Array:
    """The copy, or the parameter where it is not the rounded copy."""
    return jnp.where(_is_rounded(param, master), master, param.astype(jnp.float32))


@jax.custom_jvp
def _moved(master: Array, update: Array) -> Array:
    """The copy after a step. Every derivative of a step passes through here."""
    return (master + update).astype(master.dtype)


@_moved.defjvp
def _moved_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # By itself a comparison of bits ends it: it would be 0, without a word.
    raise UnsupportedError(
        "The update of master_weights cannot be differentiated: it rounds the parameters. Keep "
        "them in float32, without master_weights, and cast them in the loss."
    )


def _change(param: ArrayTree, master: ArrayTree, update: ArrayTree) -> ArrayTree:
    """Returns what `optax.apply_updates` adds to a parameter, to give it the rounded copy."""
    if _has_master(param):
        return _difference_jit(param, master)
    # `optax.apply_updates` adds to float8 nothing else.
    fits = gating.is_narrow(param) and gating.is_gradient(update)
    return update.astype(param.dtype) if fits else update


def _difference(param: Array, master: Array) -> Array:
    """The rounded copy minus the parameter."""
    bits = _rounded(master, param)
    rounded = jax.lax.bitcast_convert_type(bits, param.dtype)
    # The difference of infinities is NaN, and that of zeros is +0.0, which turns -0.0 into 0.0.
    difference = rounded.astype(jnp.float32) - param.astype(jnp.float32)
    return jnp.where(bits == _bits(param), -0.0, difference)


# Outside of a compiled function, each of these is one dispatch instead of many.
_followed_jit, _moved_jit, _difference_jit = (
    jax.jit(function, inline=True) for function in (_followed, _moved, _difference)
)


def _is_rounded(param: Array, master: Array) -> Array:
    """Whether each element of the parameter is that of the rounded copy, by bits."""
    return _rounded(master, param) == _bits(param)


def _rounded(master: Array, param: Array) -> Array:
    """The bits of the rounded copy, without a -0.0 that no sum would be."""
    bits = _bits(master.astype(param.dtype))
    # Selected by bits: XLA would otherwise leave out the rounding.
    return jnp.where((bits == _MINUS_ZERO) & (_bits(param) != _MINUS_ZERO), 0, bits)


_MINUS_ZERO = 0x8000


def _bits(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint16)

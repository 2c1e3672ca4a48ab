"""Loss scaling as an Optax transformation around another one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import lossscale.optax.gating as gating
import lossscale.optax.overflow_tracking as tracking
import lossscale.optax.scale_state as scale_state
from lossscale.arguments import rule_from_arguments
from lossscale.errors import AlreadyWrappedError, GradientsError
from lossscale.jax.apply_or_skip import ArrayTree, Path, varying_axes
from lossscale.jax.gradients import Gradient, all_finite, unscaled
from lossscale.optax.gating import GradientTransformationExtraArgs
from lossscale.optax.masters import MasterWeights, check_inner, trains_float16
from lossscale.optax.scale_state import LossScaleState
from lossscale.optax.state_lookup import nodes
from lossscale.packages import warn
from lossscale.rules import ScaleRule


def loss_scaled(
    inner: optax.GradientTransformation,
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
    *,
    rule: ScaleRule | None = None,
    axis_name: str | Sequence[str] | None = None,
    track_overflows: bool = False,
) -> GradientTransformationExtraArgs[LossScaleState]:
    """Wraps an Optax transformation with loss scaling.

    `update` takes the gradients of the scaled loss. It divides them by the scale, in float32 or
    wider, and checks them. If every element is finite, the inner transformation gets them.
    If not, the updates are -0.0, the inner state stays the same, bit for bit, the scale is lowered
    and the skip is counted.

    Make it the outermost one: `loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), ...))`.
    Clipping, weight decay, averaging and accumulation then see unscaled gradients of applied steps
    only.

    Line searches and L-BFGS, which compute losses and gradients themselves, are not supported.

    Trained float16 parameters are rounded after each step, and `init` warns. To keep float32 copies
    of them, write `loss_scaled(master_weights(...))`.

    Args:
        inner: The transformation to wrap, such as `optax.adamw(1e-3)`.
        dynamic: Whether the scale is adjusted during training. If False, `initial_scale` is the
            fixed scale, and gradients are not checked.
        initial_scale: The first (or the fixed) loss scale, from 2**-126 to 2**126. None means
            2**15.
        dynamic_growth_steps: Number of finite steps in a row after which the scale doubles. None
            means 2000.
        rule: A `DynamicScale`, a `FixedScale` or a custom rule, instead of the three arguments
            above.
        axis_name: One or more axes of a `pmap` or `shard_map` along which the gradients differ
            between devices. If one device skips a step, all of them skip it. Not needed under
            `jit`, nor if the gradients were averaged along the axis.
        track_overflows: Whether the state tracks, for a `Monitor`, the scale of the last step, and
            the number of infinities and NaN in each gradient of the last skipped step, added up
            over `axis_name`. A gradient that is the same on all devices is counted once, but once
            for each device in `pmap` and with `check_vma=False`, where JAX does not know that.
            Nothing waits for the counts, and training gives the same numbers.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its state is a `LossScaleState`. Other arguments
        of `update` go to the inner transformation; pass a loss (`value`) without a loss scale.
        Functions are refused, and so are the scaled gradients: the same arrays, or `grad`. Updates
        are float32 or wider. They are float16 or bfloat16 only if the gradients and the parameters,
        which `update` is given, both are, and `inner` is not the result of `master_weights`.

    Raises:
        AlreadyWrappedError: If `inner` already has loss scaling. If only its state shows that,
            `init` raises it.
        ArgumentTypeError: If `inner` is not an Optax transformation, `dynamic` not a bool, or
            `rule` not a rule.
        ArgumentError: If a scale or a number of steps is invalid. `update` raises it if `inner`
            changes the structure of its state.
        UnsupportedError: If `inner` is L-BFGS or has a line search (`init` raises it), or an
            argument of `update` is a function or holds the scaled gradients.

    Examples:
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5), initial_scale=8)
        >>> weight = jnp.float32(1.0)
        >>> opt_state = tx.init(weight)
        >>> updates, opt_state = tx.update(jnp.float32(8.0 * 0.25), opt_state, weight)
        >>> float(updates), float(opt_state.loss_scale)
        (-0.125, 8.0)
        >>> updates, opt_state = tx.update(jnp.float32(jnp.inf), opt_state, weight)
        >>> float(updates), float(opt_state.loss_scale), int(opt_state.steps_skipped)
        (-0.0, 4.0, 1)

    Source: the order of scaling, checking and skipping of Micikevicius et al., "Mixed Precision
    Training", ICLR 2018, https://arxiv.org/abs/1710.03740, section 3.2.
    """
    chosen_rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
    axis_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    checked = gating.checked_transformation(inner)
    owner = gating.owner_of(checked)
    if isinstance(owner, LossScaled):
        raise AlreadyWrappedError(_TWICE)
    has_masters = isinstance(owner, MasterWeights)
    wrapped = LossScaled(checked, chosen_rule, axis_names, has_masters, track_overflows)
    return GradientTransformationExtraArgs(wrapped.init, wrapped.update)


@dataclasses.dataclass(eq=False)
class LossScaled:
    """The two functions of a transformation with loss scaling."""

    inner: optax.GradientTransformationExtraArgs
    rule: ScaleRule
    axis_names: tuple[str, ...]
    has_masters: bool
    tracks: bool
    has_warned: bool = False

    def _widened(self, params: ArrayTree) -> ArrayTree:
        # With float16 parameters, the state would start as float16 and become float32 at the first
        # step. `master_weights` widens them itself.
        return params if self.has_masters else jax.tree.map(gating.widened_if_narrow, params)

    def init(self, params: ArrayTree) -> LossScaleState:
        """Returns the state before the first step."""
        inner_state = self.inner.init(self._widened(params))
        if nodes(inner_state, LossScaleState.__name__):
            raise AlreadyWrappedError(_TWICE)
        if not self.has_masters:
            check_inner(inner_state)
            if not self.has_warned and trains_float16(params, inner_state):
                self.has_warned = True
                warn(
                    "float16 parameters are rounded after each step, and lose small updates. "
                    "Write loss_scaled(master_weights(tx)), which keeps float32 copies of them, "
                    "or keep trained parameters in float32."
                )
        inner_state = scale_state.without_shared_buffers(inner_state, params)
        state = scale_state.state_of(self.rule.init(), inner_state)
        return state._replace(tracked=tracking.first(params)) if self.tracks else state

    def update(
        self, updates: ArrayTree, state: LossScaleState, params: ArrayTree = None, **extra_args: Any
    ) -> tuple[ArrayTree, LossScaleState]:
        """Returns the updates and the state after a step.

        Args:
            updates: Gradients of the scaled loss.
            state: The state before the step.
            params: The parameters, for transformations that read them.
            extra_args: Further arguments of the inner transformation.
        """
        if extra_args:
            gating.check_extra_args(extra_args, updates)
        updates = gating.with_arrays(updates)
        leaves, structure = jax.tree.flatten(updates)
        gradients = [leaf for leaf in leaves if gating.is_gradient(leaf)]
        before = scale_state.scalars_of(self.rule, state)
        tracking.check_state(state, self.tracks, updates)
        finite, divided = _check_and_unscale(
            self.rule, self.axis_names, gradients, before.loss_scale
        )
        given = iter(divided)
        unscaled_tree = jax.tree.unflatten(
            structure, [next(given) if gating.is_gradient(leaf) else leaf for leaf in leaves]
        )

        given_params = self._widened(params)
        new_updates, inner_state = gating.update_or_skip(
            lambda: self.inner.update(unscaled_tree, state.inner_state, given_params, **extra_args),
            finite,
            state.inner_state,
        )
        if not self.has_masters:
            new_updates = _narrowed(new_updates, updates, params)
        after = before
        # A step without gradients is not finite.
        if gating.has_elements(gradients):
            after = scale_state.moved(self.rule, before, finite)
        after = after._replace(inner_state=inner_state)
        if self.tracks:
            tracked = tracking.after_step(self.rule, self.axis_names, state, after, updates)
            after = after._replace(tracked=tracked)
        return new_updates, after


# Outside of a compiled function, this is one dispatch instead of many.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _check_and_unscale(
    rule: ScaleRule, axis_names: tuple[str, ...], gradients: list[Array], scale: Array
) -> tuple[Array | None, list[Gradient]]:
    """Returns whether gradients are finite (None if unchecked), and the unscaled gradients."""
    if not (rule.checks_gradients and gating.has_elements(gradients)):
        return None, unscaled(gradients, scale, rule.powers_of_two)
    usable = scale_state.is_usable(rule, scale)
    # Dividing by a NaN scale would turn finite gradients into NaN.
    scale = jnp.where(usable, scale, jnp.ones_like(scale))
    divisor = scale if scale_state.may_be_below_one(rule) else None
    finite = all_finite(gradients, divisor, rule.powers_of_two)
    finite = _all_devices_finite(finite & usable, axis_names, scale)
    # The inner transformation never receives a non-finite number, and none is divided: `checkify`
    # and `jax_debug_nans` would report the NaN.
    gated = [jnp.where(finite, part, jnp.zeros_like(part)) for part in gradients]
    return finite, unscaled(gated, scale, rule.powers_of_two)


def _all_devices_finite(finite: Array, axis_names: tuple[str, ...], scale: Array) -> Array:
    """Whether gradients are finite on all devices along these axes.

    Args:
        finite: Whether the gradients of this device are finite, a boolean scalar array.
        axis_names: Names of axes of `pmap`, `shard_map` or `vmap`.
        scale: The loss scale. An axis along which it varies is one where each device has its own.

    Raises:
        GradientsError: If devices that share one loss scale would decide differently.
    """
    if axis_names:
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis_names) > 0
    axes = varying_axes(finite) - varying_axes(scale)
    if axes:
        names = ", ".join(map(repr, sorted(axes)))
        raise GradientsError(
            f"Gradients differ between devices along the mesh axis {names}. Some devices would "
            "skip a step that others apply. Average them first (jax.lax.pmean), or if each device "
            f"has its own parameters, pass it: loss_scaled(..., axis_name={names})."
        )
    return finite


_TWICE = (
    "This optimizer already has loss scaling; a second layer would divide the gradients twice. Use "
    "it as it is, or wrap the whole chain once: loss_scaled(optax.chain(...))."
)


def _narrowed(updates: ArrayTree, gradients: ArrayTree, params: ArrayTree) -> ArrayTree:
    """Rounds each update to the wider dtype of its gradient and its parameter, as Optax would.

    Without parameters the updates stay float32: the parameters may be float32, and in float16 an
    update that the loss scale protected may be 0.
    """
    if params is None or not any(map(gating.is_narrow, jax.tree.leaves(gradients))):
        return updates
    # Matched by path: the inner transformation may return updates of another structure.
    given = [dict(jax.tree.leaves_with_path(tree)) for tree in (gradients, params)]

    def cast(path: Path, update: ArrayTree) -> ArrayTree:
        here = [leaves[path] for leaves in given if path in leaves]
        dtypes = {leaf.dtype for leaf in here if gating.is_narrow(leaf)}
        fits = path in given[1] and all(map(gating.is_narrow, here)) and len(dtypes) == 1
        # float32 holds both float16 and bfloat16.
        return update.astype(dtypes.pop()) if fits and gating.is_gradient(update) else update

    return jax.tree.map_with_path(cast, updates)

"""The loss scale of jmp and of Flax as a rule and a state of `loss_scaled`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optax

from lossscale.checks import LARGEST_SCALE, SMALLEST_SCALE
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError
from lossscale.optax.scale_state import LossScaleState, state_of
from lossscale.optax.state_lookup import states_below
from lossscale.packages import warn
from lossscale.rules import DynamicScale, FixedScale, ScaleRule

if TYPE_CHECKING:
    import jmp
    from flax.training import dynamic_scale as flax_dynamic_scale


def from_jmp(
    loss_scale: jmp.LossScale, inner_state: optax.OptState, *, min_scale: float | None = None
) -> tuple[ScaleRule, LossScaleState]:
    """Takes over a run whose loss was scaled with `jmp`.

    The scale continues as `adjust` would move it: bit for bit if the factor is a power of two.
    Otherwise the last digits may differ, because jmp divides by the factor.

    Args:
        loss_scale: A `jmp.DynamicLossScale`, `StaticLossScale` or `NoOpLossScale`. If it went
            through `pmap`, pass one replica.
        inner_state: The state of the Optax optimizer in jmp's loop, unchanged.
        min_scale: The minimum scale. None takes the one in `loss_scale`, which jmp resets to 1
            whenever the object passes through a JAX transformation.

    Returns:
        The rule, for `loss_scaled(inner, rule=rule)`, and the state, to use instead of
        `init(params)`.

    Raises:
        ArgumentTypeError: If `loss_scale` is not one of these classes.
        ArgumentError: If a number in it is invalid.
        AlreadyWrappedError: If `inner_state` already has a loss scale.

    Examples:
        >>> import jmp
        >>> scale = jmp.DynamicLossScale(jnp.float32(64), jnp.int32(9), period=10)
        >>> rule, opt_state = lossscale.optax.from_jmp(scale, optax.sgd(0.5).init(jnp.ones(2)))
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5), rule=rule)
        >>> _, opt_state = tx.update(jnp.ones(2), opt_state)
        >>> float(lossscale.optax.loss_scale(opt_state))
        128.0

    Source: https://github.com/google-deepmind/jmp, version 0.0.4.
    """
    expected = "a jmp.DynamicLossScale, jmp.StaticLossScale or jmp.NoOpLossScale"
    if hasattr(loss_scale, "period"):
        _check_attributes(loss_scale, expected, ("loss_scale", "counter", "factor"))
        factor = _number_in("factor", loss_scale.factor)
        # The largest float16 is below what the rule goes up to.
        is_narrow = np.asarray(loss_scale.loss_scale).dtype == np.float16
        lowest = loss_scale.min_loss_scale if min_scale is None else min_scale
        rule = _dynamic(
            _number_in("loss_scale", loss_scale.loss_scale),
            growth_interval=int(_number_in("period", loss_scale.period)),
            growth_factor=factor,
            backoff_factor=1.0 / factor if factor else 0.0,
            min_scale=_number_in("min_scale", lowest),
            max_scale=float(np.finfo(np.float16).max) if is_narrow else None,
        )
        good_steps = int(_number_in("counter", loss_scale.counter))
        return rule, _converted_state(rule, {"good_steps": good_steps}, inner_state)
    _check_attributes(loss_scale, expected, ("adjust", "loss_scale"))
    fixed = FixedScale(_number_in("loss_scale", loss_scale.loss_scale))
    return fixed, _converted_state(fixed, {}, inner_state)


def from_flax(
    dynamic_scale: flax_dynamic_scale.DynamicScale, inner_state: optax.OptState
) -> tuple[ScaleRule, LossScaleState]:
    """Takes over a run whose loss was scaled with Flax's `DynamicScale`.

    The scale continues as Flax would move it, bit for bit. Flax grows the scale one step later
    than its `growth_interval`, so the interval of the rule is one step longer.

    Args:
        dynamic_scale: A `flax.training.dynamic_scale.DynamicScale`. If it went through `pmap`,
            pass one replica.
        inner_state: The state of the Optax optimizer, such as `train_state.opt_state`, unchanged.

    Returns:
        The rule, for `loss_scaled(inner, rule=rule)`, and the state, to use instead of
        `init(params)`.

    Raises:
        ArgumentTypeError: If `dynamic_scale` is not a `DynamicScale`.
        ArgumentError: If a number in it is invalid.
        AlreadyWrappedError: If `inner_state` already has a loss scale.

    Examples:
        >>> from flax.training.dynamic_scale import DynamicScale
        >>> scale = DynamicScale(growth_interval=2000, scale=64.0)
        >>> rule, opt_state = lossscale.optax.from_flax(scale, optax.sgd(0.5).init(jnp.ones(2)))
        >>> rule.growth_interval, float(lossscale.optax.loss_scale(opt_state))
        (2001, 64.0)

    Source: https://flax.readthedocs.io, `flax.training.dynamic_scale`, version 0.12.
    """
    names = ("growth_factor", "backoff_factor", "growth_interval", "fin_steps", "minimum_scale")
    expected = "a flax.training.dynamic_scale.DynamicScale"
    _check_attributes(dynamic_scale, expected, ("scale", *names), "dynamic_scale")
    lowest = dynamic_scale.minimum_scale
    rule = _dynamic(
        _number_in("scale", dynamic_scale.scale),
        growth_interval=int(_number_in("growth_interval", dynamic_scale.growth_interval)) + 1,
        growth_factor=_number_in("growth_factor", dynamic_scale.growth_factor),
        backoff_factor=_number_in("backoff_factor", dynamic_scale.backoff_factor),
        min_scale=0.0 if lowest is None else _number_in("minimum_scale", lowest),
        max_scale=None,
    )
    good_steps = int(_number_in("fin_steps", dynamic_scale.fin_steps))
    return rule, _converted_state(rule, {"good_steps": good_steps}, inner_state)


def _dynamic(scale: float, *, min_scale: float, max_scale: float | None, **given: Any) -> Any:
    # Without a minimum, or with a subnormal one, use the smallest allowed scale.
    lowest = max(min_scale, SMALLEST_SCALE) if min_scale >= 0 else min_scale
    highest = LARGEST_SCALE if max_scale is None else max_scale
    usable = math.isfinite(scale) and scale > 0
    first = min(max(scale if usable else DynamicScale.initial_scale, lowest), highest)
    rule = DynamicScale(initial_scale=first, min_scale=lowest, max_scale=max_scale, **given)
    if first != scale:
        warn(
            f"The loss scale was {scale}, outside the range of {rule}. Training continues with "
            f"{first}."
        )
    return rule


def _converted_state(
    rule: ScaleRule, fields: Mapping[str, Any], inner_state: Any
) -> LossScaleState:
    """Builds the state from fields of the rule's state; warns if it moves the scale into range."""
    if states_below(inner_state):
        raise AlreadyWrappedError(
            "`inner_state` must be the state of the inner optimizer. Received: a state that has a "
            "loss scale already. Pass its `inner_state`."
        )
    first = rule.init()
    kept = {name: type(getattr(first, name))(value) for name, value in fields.items()}
    return state_of(rule.restored(first._replace(**kept)), inner_state)


def _number_in(name: str, value: Any) -> Any:
    """The Python number in an array.

    Raises:
        ArgumentError: If it is not an array with one number.
    """
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "fiub" + "V":
        raise ArgumentError(
            f"`{name}` must be a number, or an array with one. Received: an array of shape "
            f"{array.shape} and dtype {array.dtype}. If the state went through pmap, pass one "
            "replica: jax.tree.map(lambda x: x[0], state)."
        )
    # NumPy has no kind for bfloat16.
    return float(array.item()) if array.dtype.kind == "V" else array.item()


def _check_attributes(
    given: Any, expected: str, names: Sequence[str], argument: str = "loss_scale"
) -> None:
    if not all(hasattr(given, name) for name in names):
        raise ArgumentTypeError(
            f"`{argument}` must be {expected}. Received: a {type(given).__name__}."
        )

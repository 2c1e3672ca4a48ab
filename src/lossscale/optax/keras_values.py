"""The loss scale of the Keras 3 optimizer as a state of `loss_scaled`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from lossscale.common.state_names import variable_name
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.optax.conversions import (
    converted_state,
    fields_of,
    number_in,
    value_of,
)
from lossscale.optax.finding import state_in
from lossscale.optax.scale_state import LossScaleState
from lossscale.rules import ScaleRule


def from_keras(rule: ScaleRule, values: Mapping[str, Any], inner_state: Any) -> LossScaleState:
    """Takes over the loss scale and the counters of a `lossscale.LossScaleOptimizer` of Keras 3.

    Args:
        rule: Its rule, `optimizer.rule`.
        values: Its variables by name: `{v.name: v for v in optimizer.variables}`. Those with
            other names than `dynamic_scale`, `step_counter`, `steps_skipped` and
            `last_step_skipped`, and the further fields of a rule, are left alone.
        inner_state: The state of the Optax optimizer that is to go on. Keras' moments are not
            those of Optax; an optimizer that begins is `inner.init(params)`.

    Returns:
        The state for `loss_scaled(inner, rule=rule)`, in the place of `init(params)`.

    Raises:
        ArgumentError: If `dynamic_scale` is missing, or a value is no scalar. It is a
            `ValueError`.
        ArgumentTypeError: If `values` is no dictionary. It is a `TypeError`.
        AlreadyWrappedError: If `inner_state` has a loss scale already. It is a `TypeError`.

    Example:
        >>> values = {"dynamic_scale": 64.0, "step_counter": 3, "steps_skipped": 2}
        >>> rule = lossscale.DynamicScale()
        >>> opt_state = lossscale.optax.from_keras(rule, values, optax.sgd(0.5).init(jnp.ones(2)))
        >>> float(opt_state.loss_scale), int(opt_state.skipped_steps)
        (64.0, 2)
    """
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(
            "`values` must be a dictionary of names and values: {v.name: v for v in "
            f"optimizer.variables}}. Received: a {type(values).__name__}."
        )
    if "dynamic_scale" not in values:
        raise ArgumentError(
            "`values` must have the loss scale as 'dynamic_scale', as the variables of a "
            f"lossscale.LossScaleOptimizer of Keras 3 do. Received: {sorted(map(str, values))}."
        )
    names = {field: variable_name(field) for field in rule.init()._fields}
    found = {
        field: number_in(name, values[name]) for field, name in names.items() if name in values
    }
    state = converted_state(rule, found, inner_state)
    skipped = int(number_in("steps_skipped", values.get("steps_skipped", 0)))
    just_skipped = bool(number_in("last_step_skipped", values.get("last_step_skipped", False)))
    return state._replace(
        skipped_steps=jnp.array(skipped, jnp.int32),
        # Keras does not say how many there were in a row.
        consecutive_skips=jnp.array(just_skipped, jnp.int32),
        last_step_finite=jnp.array(not just_skipped),
    )


def to_keras(rule: ScaleRule, opt_state: Any) -> dict[str, Any]:
    """Returns the loss scale and the counters as a `LossScaleOptimizer` of Keras 3 names them.

    Args:
        rule: The rule of the optimizer.
        opt_state: Its state.

    Returns:
        Names to Python numbers. Each goes into the variable of the Keras optimizer of that name,
        once the optimizer is built: `variable.assign(values[variable.name])`.

    Raises:
        ArgumentTypeError: If `opt_state` has no loss scale. It is a `TypeError`.

    Example:
        >>> rule = lossscale.DynamicScale(initial_scale=8)
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5), rule=rule)
        >>> lossscale.optax.to_keras(rule, tx.init(jnp.ones(2)))["dynamic_scale"]
        8.0
    """
    state = state_in(opt_state)
    values = {variable_name(field): value for field, value in fields_of(rule, state).items()}
    return {
        **values,
        "steps_skipped": int(value_of(state.skipped_steps)),
        "last_step_skipped": not bool(value_of(state.last_step_finite)),
    }

"""Applies a step or skips it, for every wrapper whose variables are TensorFlow's.

It uses a branch in eager mode, in a `tf.function`, on replicas of a `tf.distribute` strategy and in
TensorFlow 1 graphs. Under XLA, a branch around an optimizer would copy every variable. There each
assignment selects the new or the old value instead. Later operations read the selected value, so
the whole step is skipped, and XLA fuses the select into the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lossscale import registry
from lossscale.common.autograph import do_not_convert
from lossscale.rules import GradientStats
from lossscale.tensorflow.private_names import (
    as_one_operation,
    strategy_supports_no_merge_call,
)
from lossscale.tensorflow.tracing import after, grouped, in_xla

_KERASES = tuple(framework.root for framework in registry.KERASES)
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")


def apply_or_skip(
    stats: GradientStats,
    gradients: Sequence[Any],
    divisor: Any,
    apply: Callable[[Sequence[Any], Any], Any],
    update_scale: Callable[[GradientStats], Any],
    kept: Callable[[], Sequence[Any]] | None = None,
) -> Any:
    """Applies or skips a step on all replicas alike, then updates the loss scale once.

    Args:
        stats: The statistics for the rule. `finite` is the common decision of the replicas, a
            boolean scalar tensor; or True, to apply always.
        gradients: The gradients of this replica.
        divisor: The divisor of the gradients, as this replica reads it; None for no division.
        apply: Divides a list of gradients by a divisor and applies it; called in a replica context.
        update_scale: Updates the loss scale, given the statistics; called once.
        kept: Returns all variables that `apply` may change, if a step may be skipped by keeping
            their old values instead of by a branch.

    Returns:
        The operation that runs the step in a graph; None in eager mode.
    """
    finite = stats.finite
    if kept is not None and finite is not True:
        with _keeping_old_values(kept(), finite):
            applied = apply(gradients, divisor)
        return grouped(applied, update_scale(stats))
    if not tf.distribute.has_strategy() or strategy_supports_no_merge_call():
        return grouped(_apply_if(finite, lambda: apply(gradients, divisor)), update_scale(stats))

    @do_not_convert
    def in_cross_replica(
        strategy: Any, stats: GradientStats, gradients: Sequence[Any], divisor: Any
    ) -> Any:
        # The statistics are the same on all replicas.
        stats = tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], stats)
        # The branch must be outside the replicas: inside a branch they could not synchronize to
        # sum their gradients.
        applied = _apply_if(
            stats.finite,
            lambda: strategy.extended.call_for_each_replica(apply, args=(gradients, divisor)),
        )
        return grouped(applied, update_scale(stats))

    replica = tf.distribute.get_replica_context()
    return replica.merge_call(in_cross_replica, args=(stats, list(gradients), divisor))


def _apply_if(finite: Any, apply: Callable[[], Any]) -> Any:
    if finite is True:
        return apply()
    return as_one_operation(tf.cond(finite, lambda: _finished(apply()), _finished))


def _finished(*results: Any) -> Any:
    """Returns a tensor for a branch to return, which depends on these operations."""
    return after(results, lambda: tf.constant(True))


def can_keep_old_values(inner_optimizer: Any, gradients: Sequence[Any]) -> bool:
    """Whether the step that is being traced can be skipped by keeping old values.

    Args:
        inner_optimizer: It must be a Keras optimizer: another one may write to variables that it
            does not list, or with other operations. It must not average variables: XLA would round
            the averages differently after a select.
        gradients: They must be dense: a scattered update has no old value to select.
    """
    return (
        in_xla()
        and not tf.distribute.has_strategy()
        and not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        and all(
            type(part).__module__.partition(".")[0] in _KERASES
            and not getattr(part, "use_ema", False)
            for part in (inner_optimizer, *getattr(inner_optimizer, "optimizers", ()))
        )
    )


@contextlib.contextmanager
def _keeping_old_values(variables: Sequence[Any], finite: Any) -> Iterator[None]:
    """Makes assignments to these variables keep the old value unless `finite`.

    Args:
        variables: TensorFlow variables.
        finite: A boolean scalar tensor of the function being traced.
    """
    # A mixed precision variable of tf_keras passes assignments on to the one it holds.
    targets = list({id(v): v for v in (getattr(v, "_variable", v) for v in variables)}.values())
    for target in targets:
        target.__dict__.update(_choosing_assignments(target, finite))
    try:
        yield
    finally:
        for target in targets:
            for name in _ASSIGNMENTS:
                target.__dict__.pop(name, None)


def _choosing_assignments(variable: Any, finite: Any) -> dict[str, Callable[..., Any]]:
    write = variable.assign

    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        old = variable.read_value()
        value = tf.convert_to_tensor(value, dtype=old.dtype)
        return write(tf.where(finite, value, old), *args, **kwargs)

    def assign_add(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable.read_value() + delta, *args, **kwargs)

    def assign_sub(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable.read_value() - delta, *args, **kwargs)

    return {"assign": assign, "assign_add": assign_add, "assign_sub": assign_sub}

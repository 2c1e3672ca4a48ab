"""TensorFlow's part of loss scaling, for every shell whose variables are TensorFlow's.

Eager mode, `tf.function`, XLA, replicas of a `tf.distribute` strategy, and graphs of TensorFlow 1,
where an operation runs only if something that is fetched depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lossscale.common.autograph import as_written
from lossscale.rules import Seen
from lossscale.tensorflow.gate import gated
from lossscale.tensorflow.private_names import strategy_supports_no_merge_call


def outside_traces() -> contextlib.AbstractContextManager[None]:
    """Within it variables are set now and once, also where a function is being traced."""
    context: contextlib.AbstractContextManager[None] = tf.init_scope()
    return context


def known(verdict: Any) -> bool | None:
    """A verdict that is known already: in eager mode, and in the branches of `apply_or_skip`.

    Args:
        verdict: A boolean scalar tensor, or True.

    Returns:
        None where it is known only when the step runs.
    """
    value = tf.get_static_value(verdict)
    return None if value is None else bool(value)


def numbers(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of scalar variables as Python numbers; in eager mode."""
    return {name: variable.numpy().item() for name, variable in variables.items()}


class Folding:
    """A namespace for rules whose `where` chooses at once if the condition is known."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        """Chooses between two values; their dtype may stay what it is."""
        chosen = None if tf.executing_eagerly() else known(condition)
        if chosen is None:
            return self._namespace.where(condition, one, other)
        return one if chosen else other


def apply_or_skip(
    seen: Seen,
    gradients: Sequence[Any],
    scale: Any,
    apply: Callable[[Sequence[Any], Any], Any],
    move: Callable[[Seen], Any],
    gate: Callable[[], Sequence[Any]] | None = None,
) -> Any:
    """Applies gradients or does not, on all replicas alike, then moves the loss scale once.

    Args:
        seen: What the rule sees, with the replicas' common verdict, a boolean scalar tensor; or
            True, to apply always.
        gradients: Those of this replica.
        scale: What they have to be divided by, as this replica reads it; None if by nothing.
        apply: Divides a list of gradients by a scale and applies it; called in a replica context.
        move: Moves the loss scale, given what the rule sees; called once.
        gate: Returns all variables that `apply` may change, if a step may be skipped by keeping
            their old values instead of by a branch.

    Returns:
        The operation that does all this in a graph; None in eager mode.
    """
    finite = seen.finite
    if gate is not None and finite is not True:
        with gated(gate(), finite):
            done = apply(gradients, scale)
        return grouped(done, move(seen))
    if not tf.distribute.has_strategy() and finite is not True:
        # Where the verdict is a constant, most of a rule's operations are constants too.
        done = tf.cond(
            finite,
            lambda: _done(apply(gradients, scale), move(seen._replace(finite=tf.constant(True)))),
            lambda: _done(move(seen._replace(finite=tf.constant(False)))),
        )
        return grouped(done)
    if not tf.distribute.has_strategy() or strategy_supports_no_merge_call():
        return grouped(_apply_if(finite, lambda: apply(gradients, scale)), move(seen))

    @as_written
    def in_cross_replica(strategy: Any, seen: Seen, gradients: Sequence[Any], scale: Any) -> Any:
        # All replicas see the same by now.
        seen = tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], seen)
        # The condition must stand outside the replicas: inside one of its branches they could
        # not meet to sum their gradients.
        applied = _apply_if(
            seen.finite,
            lambda: strategy.extended.call_for_each_replica(apply, args=(gradients, scale)),
        )
        return grouped(applied, move(seen))

    replica = tf.distribute.get_replica_context()
    return replica.merge_call(in_cross_replica, args=(seen, list(gradients), scale))


def _apply_if(finite: Any, apply: Callable[[], Any]) -> Any:
    if finite is True:
        return apply()

    return tf.cond(finite, lambda: _done(apply()), _done)


def _done(*done: Any) -> Any:
    """What a branch returns that has done all this."""
    return after(done, lambda: tf.constant(True))


def grouped(*done: Any) -> Any:
    """Returns one operation that waits for all of these; None in eager mode.

    Args:
        done: Operations, tensors and nests of these; anything else in them is left out.
    """
    if tf.executing_eagerly():
        return None
    return tf.group(*_in_graph(done))


def after(done: Any, value: Callable[[], Any]) -> Any:
    """Returns the value of a callable, in a graph as a tensor that waits for `done`."""
    if tf.executing_eagerly():
        return value()
    with tf.control_dependencies(_in_graph(done)):
        return tf.identity(value())


def _in_graph(done: Any) -> list[Any]:
    local_results = tf.distribute.get_strategy().experimental_local_results
    return [
        part
        for value in tf.nest.flatten(done)
        for part in local_results(value)
        if isinstance(part, (tf.Operation, tf.Tensor)) or hasattr(part, "_as_graph_element")
    ]

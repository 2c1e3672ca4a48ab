"""TensorFlow: eager, `tf.function`, XLA, and replicas of a `tf.distribute` strategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from lossscale.frameworks import host_rule, tensorflow_gate, tensorflow_ops
from lossscale.frameworks.checks import flat_list
from lossscale.frameworks.keras.engines.common import aggregation_name
from lossscale.frameworks.tensorflow_ops import (
    all_finite,
    check_strategy,
    current_place,
    flat_gradients,
    known,
    outside_traces,
    replica_count,
    scaled,
    unscaled,
)
from lossscale.rules import ScaleState

__all__ = [
    "aggregation_name",
    "all_finite",
    "check_strategy",
    "current_place",
    "flat_gradients",
    "known",
    "outside_traces",
    "replica_count",
    "scaled",
    "unscaled",
]

# TensorFlow's own functions do not mix integer dtypes, as the rules of users may.
namespace = tensorflow_ops.Folding(keras.ops)


def is_variable(value: Any) -> bool:
    """Whether a gradient can be applied to `value`."""
    return isinstance(value, (tf.Variable, keras.Variable))


def native(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def read(variable: Any) -> Any:
    """The value of a Keras variable now, as a tensor."""
    return tf.convert_to_tensor(variable.value)


def cast(gradient: Any, dtype: str) -> Any:
    """Returns a gradient, dense or sparse, in another dtype."""
    return tf.cast(gradient, dtype)


def run_step(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any, aggregate: bool
) -> None:
    """Unscales and applies gradients or skips the step, on all replicas alike.

    Args:
        optimizer: The loss scale optimizer, built.
        gradients: Gradients of this replica; None where there is none.
        variables: Their variables.
        scale: What the gradients have to be divided by; None if they are unscaled already.
        aggregate: Whether the inner optimizer sums the gradients of the replicas.
    """
    check_strategy()
    tensorflow_ops.check_replica_context()
    inner = optimizer.inner_optimizer

    def apply_inner(gradients: Sequence[Any], scale: Any) -> None:
        with _summing(inner, aggregate):
            _apply_inner(inner, optimizer._for_inner(gradients, variables, scale), list(variables))

    def written() -> list[Any]:
        return [native(v) for v in (*inner.variables, *inner._trainable_variables, *variables)]

    # Keras sums the gradients of the replicas inside the inner optimizer, after this point, so
    # one replica does not see the overflow of another.
    finite = tensorflow_ops.agreed(optimizer._judge(gradients, variables, scale))
    if optimizer._watch is not None:
        optimizer._note(gradients, variables, scale, finite, is_shared=not aggregate)
    gate = written if tensorflow_gate.can_gate(inner, gradients) else None
    move = optimizer._move_scale
    if _host_can_move(optimizer):
        move = functools.partial(_move_on_host, optimizer)
    tensorflow_ops.apply_or_skip(finite, gradients, scale, apply_inner, move, gate)


def _apply_inner(inner: Any, gradients: list[Any], variables: list[Any]) -> None:
    # Keras' trainer calls `apply_gradients`, so that is what people override.
    if type(inner).apply_gradients is keras.optimizers.Optimizer.apply_gradients:
        inner.apply(gradients, variables)
    else:
        inner.apply_gradients(list(zip(gradients, variables, strict=True)))


def _host_can_move(optimizer: Any) -> bool:
    return (
        tf.executing_eagerly()
        and not tf.distribute.has_strategy()
        and optimizer._state is not None
        and host_rule.host_can_move(optimizer._rule)
    )


def _move_on_host(optimizer: Any, finite: Any) -> None:
    """Does what the optimizer's `_move_scale` does, with Python numbers."""
    variables, skipped = optimizer._state.variables, optimizer._steps_skipped
    before = tensorflow_ops.numbers({field: v.value for field, v in variables.items()})
    changes = host_rule.changes(optimizer._rule, ScaleState(**before), bool(finite))
    written = [(variables[field], value) for field, value in changes.items()]
    steps_skipped = skipped.value.numpy().item()
    if finite is not True:
        written.append((optimizer._last_step_skipped, not finite))
        if not finite:
            steps_skipped += 1
            written.append((skipped, steps_skipped))
    applied = optimizer.inner_optimizer._iterations.value.numpy().item()
    written.append((optimizer._iterations, applied + steps_skipped))
    for variable, value in written:
        # Keras' own way takes several times as long.
        variable.value.assign(value)


@contextlib.contextmanager
def _summing(inner_optimizer: Any, aggregate: bool) -> Iterator[None]:
    """Within it the inner optimizer sums the gradients of all replicas, or does not."""
    if aggregate:
        yield
        return
    # Keras 3 has no argument for this; the sum is one method, here replaced on the instance.
    parts = [inner_optimizer, *getattr(inner_optimizer, "optimizers", ())]
    for part in parts:
        part.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_all_reduce_sum_gradients", None)


def new_watch(histograms_every: int | None, new_variable: Callable[..., Any]) -> Any:
    """Returns what notes steps for a monitor.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a Keras variable of a name, a dtype and a shape, with zeros in it.
    """
    from lossscale.frameworks.watches.tensorflow import Watch

    return Watch(histograms_every)


def differentiate(
    loss: Any,
    variables: Any,
    scale: Callable[[Any], Any],
    *,
    tape: Any = None,
    grad_loss: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of a scaled loss, and the variables they belong to.

    Args:
        loss: A callable without arguments, or with `tape` a tensor that the tape recorded.
        variables: A list, one variable, a callable that returns either, or None for the
            trainable variables that the tape watched.
        scale: Multiplies a loss by the loss scale.
        tape: A `tf.GradientTape`; None records `loss` on a new one.
        grad_loss: Tensor of the loss's shape that multiplies the gradients, or None.
    """
    recording = tensorflow_ops.recorded(loss, variables, scale, tape=tape)
    scaled_loss, variables = recording.loss, flat_variables(recording.variables)
    if grad_loss is not None:
        # Given for the loss, which may be narrower than what it became when it was scaled.
        grad_loss = tf.cast(grad_loss, scaled_loss.dtype)
    gradients = recording.tape.gradient(
        scaled_loss, [native(v) for v in variables], output_gradients=grad_loss
    )
    return list(gradients), variables


def symbolic_gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a tensor of the graph that is being traced.

    Raises:
        GradientsError: In eager mode, where a tensor does not know how it was computed.
    """
    tensorflow_ops.check_symbolic(loss)
    gradients: list[Any] = tf.gradients(loss, [native(v) for v in variables])
    return gradients


def flat_variables(variables: Any) -> list[Any]:
    """Returns a list of variables from one variable or a nest of them."""
    return flat_list(variables, tf.nest.flatten, is_variable)

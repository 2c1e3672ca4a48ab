"""TensorFlow: eager, `tf.function`, XLA, and replicas of a `tf.distribute` strategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from lossscale.common import host_rule
from lossscale.common.autograph import as_written
from lossscale.common.checks import flat_list
from lossscale.common.notes import NotesOfVariables, StepNotes
from lossscale.common.private_names import check_attribute
from lossscale.keras.backends.common import aggregation_name
from lossscale.keras.state import Ledger
from lossscale.keras.step import Arrays, Step
from lossscale.rules import Seen
from lossscale.tensorflow import magnitudes, replicas
from lossscale.tensorflow.arrays import flat_gradients, scaled, unscaled
from lossscale.tensorflow.finite import all_finite
from lossscale.tensorflow.gate import can_gate
from lossscale.tensorflow.replicas import (
    check_strategy,
    current_place,
    replica_count,
)
from lossscale.tensorflow.step import (
    Folding,
    apply_or_skip,
    known,
    numbers,
    outside_traces,
)
from lossscale.tensorflow.tape import check_symbolic, recorded
from lossscale.tensorflow.tracing import translated

__all__ = [
    "aggregation_name",
    "all_finite",
    "cast",
    "check_strategy",
    "current_place",
    "differentiate",
    "flat_gradients",
    "flat_variables",
    "is_variable",
    "known",
    "namespace",
    "new_notes",
    "outside_traces",
    "read",
    "replica_count",
    "run_step",
    "scaled",
    "symbolic_gradients",
    "unscaled",
]

# TensorFlow's own functions do not mix integer dtypes, as the rules of users may.
namespace = Folding(keras.ops)


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


_ARRAYS = Arrays(unscaled, all_finite, cast)


def run_step(step: Step, inner: Any, ledger: Ledger, notes: StepNotes | None) -> None:
    """Unscales and applies gradients or skips the step, on all replicas alike.

    Args:
        step: The step of this replica.
        inner: The inner optimizer, built.
        ledger: What the step moves besides.
        notes: What a monitor wants noted, or None.
    """
    check_strategy()
    replicas.check_replica_context()

    def apply(gradients: Sequence[Any], scale: Any) -> None:
        given = step._replace(gradients=list(gradients), scale=scale)
        with _summing(inner, step.sum_replicas):
            _apply_inner(inner, given.for_inner(inner, _ARRAYS), step.variables)

    def written() -> list[Any]:
        known = (*inner.variables, *inner._trainable_variables, *step.variables)
        return [native(variable) for variable in known]

    # Keras sums the gradients of the replicas inside the inner optimizer, after this point, so
    # one replica does not see the overflow of another.
    finite = replicas.agreed(step.is_finite(_ARRAYS))
    seen = step.seen(magnitudes.seen, finite)
    if notes is not None:
        number = read(ledger.iterations) + 1
        notes.note(step.decided(_ARRAYS, finite, number, is_shared=not step.sum_replicas))
    gate = written if can_gate(inner, step.gradients) else None
    move = ledger.move
    if _host_can_move(step, ledger):
        move = functools.partial(_move_on_host, ledger, inner)
    apply_or_skip(seen, step.gradients, step.divisor, apply, move, gate)


def _apply_inner(inner: Any, gradients: list[Any], variables: list[Any]) -> None:
    # Keras' trainer calls `apply_gradients`, so that is what people override.
    if type(inner).apply_gradients is keras.optimizers.Optimizer.apply_gradients:
        translated(inner.apply)(gradients, variables)
    else:
        translated(inner.apply_gradients)(list(zip(gradients, variables, strict=True)))


def _host_can_move(step: Step, ledger: Ledger) -> bool:
    return (
        tf.executing_eagerly()
        and not tf.distribute.has_strategy()
        and ledger.state is not None
        and step.moves_on_host
    )


def _move_on_host(ledger: Ledger, inner: Any, seen: Seen) -> None:
    """Does what the ledger's `move` does, with Python numbers."""
    state, finite = ledger.state, seen.finite
    assert state is not None
    before = state.first._replace(**numbers({f: v.value for f, v in state.variables.items()}))
    changes = host_rule.changes(state.rule, before, bool(finite))
    written = [(state.variables[field], value) for field, value in changes.items()]
    steps_skipped = ledger.steps_skipped.value.numpy().item()
    if finite is not True:
        written.append((ledger.last_step_skipped, not finite))
        if not finite:
            steps_skipped += 1
            written.append((ledger.steps_skipped, steps_skipped))
    applied = inner._iterations.value.numpy().item()
    written.append((ledger.iterations, applied + steps_skipped))
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
        # Without a method of that name they would be summed twice, and nobody would notice.
        check_attribute(
            "keras",
            part,
            "_all_reduce_sum_gradients",
            "apply gradients that are summed over the replicas already",
        )
        part.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_all_reduce_sum_gradients", None)


def new_notes(histograms_every: int | None, new_variable: Callable[..., Any]) -> NotesOfVariables:
    """Returns what notes steps for a monitor.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a Keras variable of a name, a dtype and a shape, with zeros in it.
    """
    from lossscale.tensorflow.notes import Notes

    return Notes(histograms_every)


@as_written
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
    recording = recorded(loss, variables, scale, tape=tape)
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
    check_symbolic(loss)
    gradients: list[Any] = tf.gradients(loss, [native(v) for v in variables])
    return gradients


@as_written
def flat_variables(variables: Any) -> list[Any]:
    """Returns a list of variables from one variable or a nest of them."""
    return flat_list(variables, tf.nest.flatten, is_variable)

"""TensorFlow's part of loss scaling, for every shell whose variables are TensorFlow's.

Eager mode, `tf.function`, XLA, replicas of a `tf.distribute` strategy, and graphs of TensorFlow 1,
where an operation runs only if something that is fetched depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lossscale.errors import ArgumentError, GradientsError
from lossscale.frameworks import tensorflow_gate
from lossscale.frameworks.checks import scaled_value
from lossscale.frameworks.convention import Place
from lossscale.frameworks.finite import tensorflow as finite_check
from lossscale.frameworks.tensorflow_xla import in_xla

_SUPPORTED_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.distribute.experimental.MultiWorkerMirroredStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
)
_TPU_STRATEGIES = (
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
    tf.compat.v1.distribute.experimental.TPUStrategy,
)


def check_strategy() -> None:
    """Checks that loss scaling works under the current strategy.

    Raises:
        ArgumentError: If it does not. It is a `ValueError`.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    # Strategies over DTensor have a mesh; their gradients are whole.
    if isinstance(strategy, _SUPPORTED_STRATEGIES) or getattr(strategy, "_mesh", None) is not None:
        return
    if isinstance(strategy, _TPU_STRATEGIES):
        reason = "TPUs compute in bfloat16, which needs no loss scaling: leave it out"
    else:
        reason = (
            "it does not keep one copy of each variable per replica, so gradients would be "
            "unscaled another number of times than the loss was scaled"
        )
    raise ArgumentError(
        f"Loss scaling does not work under {type(strategy).__name__}: {reason}. Supported are "
        "MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, and no strategy."
    )


def current_place() -> Place:
    """The graph being traced, None in eager mode, and the replica; all of them outside of one."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return Place(graph, tuple(range(replica_count())))
    # A TPU traces all replicas at once: there the number is known only when the function runs.
    number = tf.get_static_value(replica.replica_id_in_sync_group)
    return Place(graph, (0 if number is None else int(number),))


def outside_traces() -> contextlib.AbstractContextManager[None]:
    """Within it variables are set now and once, also where a function is being traced."""
    context: contextlib.AbstractContextManager[None] = tf.init_scope()
    return context


def unscaled(gradients: Sequence[Any], scale: Any, exact_reciprocal: bool) -> list[Any]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of any dtype, or None. Slices stay slices.
        scale: float32 scalar tensor, or a Python float.
        exact_reciprocal: Whether multiplying by the reciprocal is exact. It is for powers of
            two; others are divided by.
    """
    factors: dict[Any, Any] = {}
    compiled = in_xla()

    def divided(gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            values = divided(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        gradient = _widened(gradient)
        if gradient.dtype not in factors:
            divisor = tf.cast(scale, gradient.dtype)
            factors[gradient.dtype] = tf.math.reciprocal(divisor) if exact_reciprocal else divisor
        factor = factors[gradient.dtype]
        result = gradient * factor if exact_reciprocal else gradient / factor
        if compiled:
            _quotients(result)[result.name] = _Quotient(gradient, scale, exact_reciprocal)
        return result

    return [divided(gradient) for gradient in gradients]


class _Quotient(NamedTuple):
    """What an unscaled gradient was made of."""

    scaled: Any
    scale: Any
    exact_reciprocal: bool


def _quotients(tensor: Any) -> dict[str, _Quotient]:
    """The unscaled gradients of a tensor's graph, by name."""
    # Kept by the graph, so that they are forgotten with it.
    collection = tensor.graph.get_collection_ref("lossscale_quotients")
    if not collection:
        collection.append({})
    quotients: dict[str, _Quotient] = collection[0]
    return quotients


def _made_of(gradient: Any) -> _Quotient | None:
    """What an unscaled gradient was made of, if that is known."""
    if not isinstance(gradient, tf.Tensor) or not in_xla():
        return None
    # What sums gradients over replicas passes on those of a single one so.
    while gradient.op.type in ("Identity", "IdentityN"):
        gradient = gradient.op.inputs[gradient.value_index]
    return _quotients(gradient).get(gradient.name)


def all_finite(gradients: Sequence[Any], scale: Any = None, exact_reciprocal: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled.

    Args:
        gradients: Tensors, `tf.IndexedSlices` (their values are looked at) or None (skipped).
        scale: What they will be divided by; None if they are unscaled already.
        exact_reciprocal: As for `unscaled`.

    Returns:
        A boolean scalar tensor.
    """
    if scale is None:
        made_of = [_made_of(gradient) for gradient in gradients if gradient is not None]
        quotients = [quotient for quotient in made_of if quotient is not None]
        if not quotients or len({id(q and q.scale) for q in made_of}) > 1:
            return finite_check.all_finite(gradients)
        # XLA would not keep the quotients, but divide once more here, and more slowly than it
        # reads what is in memory already.
        gradients = [quotient.scaled for quotient in quotients]
        _, scale, exact_reciprocal = quotients[0]
    return finite_check.all_finite(
        gradients, lambda part: unscaled([part], scale, exact_reciprocal)[0], scale < 1.0
    )


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = _widened(tf.convert_to_tensor(loss))
    return loss * tf.cast(scale, loss.dtype)


def _widened(tensor: Any) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    wide = tensor.dtype in (tf.float32, tf.float64) or tensor.dtype.is_complex
    return tensor if wide else tf.cast(tensor, tf.float32)


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, of all replicas where it holds values per replica, without None."""
    return [
        gradient
        for value in tf.nest.flatten(gradients)
        for gradient in tf.distribute.get_strategy().experimental_local_results(value)
        if gradient is not None
    ]


def replica_count() -> int:
    """How many replicas train together; 1 without a strategy."""
    count: int = tf.distribute.get_strategy().num_replicas_in_sync
    return count


def check_replica_context() -> None:
    """Checks that the call is made where each replica has gradients of its own.

    Raises:
        GradientsError: If it is not. It is a `ValueError`.
    """
    if tf.distribute.in_cross_replica_context():
        raise GradientsError(
            "Gradients must be applied in a replica context. Received a call in a cross-replica "
            "context. Call it inside the function that is given to strategy.run()."
        )


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
        # AutoGraph, which a rule is run under, cannot read an assignment inside an expression.
        chosen = None if tf.executing_eagerly() else known(condition)
        if chosen is None:
            return self._namespace.where(condition, one, other)
        return one if chosen else other


def agreed(finite: Any) -> Any:
    """Whether the gradients are finite on every replica.

    Args:
        finite: Whether they are on this one, a boolean scalar tensor; or True, if nobody looks.
    """
    if finite is True:
        return True
    finite = tf.convert_to_tensor(finite)
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return finite
    overflowed = tf.where(finite, 0.0, 1.0)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, overflowed) < 0.5


def apply_or_skip(
    finite: Any,
    gradients: Sequence[Any],
    scale: Any,
    apply: Callable[[Sequence[Any], Any], Any],
    move: Callable[[Any], Any],
    gate: Callable[[], Sequence[Any]] | None = None,
) -> Any:
    """Applies gradients or does not, on all replicas alike, then moves the loss scale once.

    Args:
        finite: The replicas' common verdict, a boolean scalar tensor; or True, to apply always.
        gradients: Those of this replica.
        scale: What they have to be divided by, as this replica reads it; None if by nothing.
        apply: Divides a list of gradients by a scale and applies it; called in a replica context.
        move: Moves the loss scale, given the verdict; called once.
        gate: Returns all variables that `apply` may change, if a step may be skipped by keeping
            their old values instead of by a branch.

    Returns:
        The operation that does all this in a graph; None in eager mode.
    """
    if gate is not None and finite is not True:
        with tensorflow_gate.gated(gate(), finite):
            done = apply(gradients, scale)
        return grouped(done, move(finite))
    if not tf.distribute.has_strategy() and finite is not True:
        # Where the verdict is a constant, most of a rule's operations are constants too.
        done = tf.cond(
            finite,
            lambda: _done(apply(gradients, scale), move(tf.constant(True))),
            lambda: _done(move(tf.constant(False))),
        )
        return grouped(done)
    if (
        not tf.distribute.has_strategy()
        or tf.__internal__.distribute.strategy_supports_no_merge_call()
    ):
        return grouped(_apply_if(finite, lambda: apply(gradients, scale)), move(finite))

    def in_cross_replica(strategy: Any, finite: Any, gradients: Sequence[Any], scale: Any) -> Any:
        if finite is not True:
            # All replicas hold the same verdict by now.
            finite = strategy.experimental_local_results(finite)[0]
        # The condition must stand outside the replicas: inside one of its branches they could
        # not meet to sum their gradients.
        applied = _apply_if(
            finite,
            lambda: strategy.extended.call_for_each_replica(apply, args=(gradients, scale)),
        )
        return grouped(applied, move(finite))

    replica = tf.distribute.get_replica_context()
    return replica.merge_call(in_cross_replica, args=(finite, list(gradients), scale))


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


class Recording(NamedTuple):
    """A loss that a tape has seen.

    Attributes:
        tape: The tape.
        loss: The scaled loss, a tensor.
        variables: What is differentiated, as it was given; None stands for the trainable
            variables that the tape watched.
    """

    tape: Any
    loss: Any
    variables: Any


def recorded(
    loss: Any, variables: Any, scale: Callable[[Any], Any], *, tape: Any = None, watch: Any = ()
) -> Recording:
    """Runs a loss under a tape and scales it there.

    Args:
        loss: A callable without arguments, or with `tape` a tensor that the tape recorded.
        variables: A list, one variable, a callable that returns either, or None.
        scale: Multiplies a loss by the loss scale, and a callable's where it is called.
        tape: A `tf.GradientTape`; None makes a new one.
        watch: Variables to record although they are not trainable.

    Raises:
        GradientsError: If `loss` is a tensor without a tape. It is a `ValueError`.
    """
    if not callable(loss) and tape is None:
        raise GradientsError(
            "`loss` must be a callable without arguments; a tensor has no gradients unless the "
            f"tape that recorded it is passed as `tape`. Received: loss={loss!r}."
        )
    with tape if tape is not None else tf.GradientTape() as recording:
        if callable(loss):
            recording.watch(watch)
        scaled_loss = scaled_value(loss, scale)
    if callable(variables):
        variables = variables()
    if variables is None:
        variables = [v for v in recording.watched_variables() if v.trainable]
    return Recording(recording, scaled_loss, variables)


def check_symbolic(loss: Any) -> None:
    """Checks that a tensor knows how it was computed.

    Raises:
        GradientsError: In eager mode, where it does not. It is a `ValueError`.
    """
    if tf.executing_eagerly():
        raise GradientsError(
            "The gradient of a tensor can be computed only inside a tf.function or a graph. Pass "
            "`loss` as a callable without arguments, or use a tf.GradientTape with "
            f"get_scaled_loss() and get_unscaled_gradients(). Received: loss={loss!r}."
        )

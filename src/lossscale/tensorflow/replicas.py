"""Replicas of a `tf.distribute` strategy: supported strategies, and their common decisions."""

from __future__ import annotations

import tensorflow as tf

from lossscale.common.private_names import do_not_convert
from lossscale.errors import ArgumentError, GradientsError
from lossscale.framework_types import Scalar, Variable

_SUPPORTED_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def check_strategy() -> None:
    """Checks that loss scaling works under the current strategy.

    Raises:
        ArgumentError: If it does not.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    # Strategies over DTensor have a mesh; their gradients are complete.
    if isinstance(strategy, _SUPPORTED_STRATEGIES) or getattr(strategy, "_mesh", None) is not None:
        return
    raise ArgumentError(
        f"Loss scaling does not work under {type(strategy).__name__}. Supported are "
        "MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, and no strategy. On "
        "TPUs, compute in bfloat16, which needs no loss scaling."
    )


@do_not_convert
def current_location() -> tuple[tf.Graph | None, tuple[int, ...]]:
    """The graph being traced, None in eager mode, and the replica; outside of one, all replicas."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return graph, tuple(range(replica_count()))
    # A TPU traces all replicas at once, so the number is known only when the function runs.
    number = tf.get_static_value(replica.replica_id_in_sync_group)
    return graph, (0 if number is None else int(number),)


def replica_count() -> int:
    """The number of replicas that train together; 1 without a strategy."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def check_replica_context() -> None:
    """Checks that a step can be taken: each replica has its own gradients.

    Raises:
        ArgumentError: If loss scaling does not work under the current strategy.
        GradientsError: If the call is made outside of the replicas.
    """
    # An optimizer is often made outside of the strategy that it is used under.
    check_strategy()
    if tf.distribute.in_cross_replica_context():
        raise GradientsError(
            "Gradients must be applied in a replica context. Received a call in a cross-replica "
            "context. Call it inside the function that is given to strategy.run()."
        )


def all_replicas_finite(finite: Scalar) -> Scalar:
    """Whether the gradients are finite on every replica.

    Keras sums them inside the inner optimizer, after the check, so that one replica does not see
    the overflow of another. Those that tf_keras has summed are the same on all replicas; others are
    not, and neither must be what an aggregation of the user's returned.

    Args:
        finite: Whether they are finite on this replica, a boolean scalar tensor; True if unchecked.
    """
    if finite is True:
        return True
    finite = tf.convert_to_tensor(finite)
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return finite
    overflowed = tf.where(finite, 0.0, 1.0)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, overflowed) < 0.5


def is_on_host(variable: Variable) -> bool:
    """Whether the host reads a variable without waiting for a device."""
    # That of a graph may be placed nowhere yet.
    kind = native(variable).device.rpartition("device:")[2]
    return not kind or kind.upper().startswith("CPU")


def native(variable: Variable) -> Variable:
    """The TensorFlow variable behind a variable of Keras 3; others as they are."""
    stored = getattr(variable, "value", variable)
    return variable if callable(stored) else stored

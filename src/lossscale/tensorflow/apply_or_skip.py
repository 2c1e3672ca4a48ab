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

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.common.private_names import do_not_convert, private_name
from lossscale.tensorflow.replicas import current_location, native
from lossscale.tensorflow.tracing import after, grouped, in_xla, translated

_strategy_supports_no_merge_call: Callable[[], bool] = private_name(
    "tensorflow",
    "__internal__.distribute.strategy_supports_no_merge_call",
    "see whether replicas can meet inside of a branch",
    # Without the name, replicas synchronize outside of it, which is always correct.
    fallback=lambda: False,
)
_KERASES = tuple(framework.root for framework in registry.KERASES)


def apply_or_skip(
    finite: ft.Scalar,
    step: Any,
    inner: ft.KerasOptimizer,
    written: Callable[[], Sequence[tf.Variable]],
    apply: Callable[[ft.Gradients, ft.Scalar | None], object],
    update: Callable[[ft.Scalar], object],
) -> ft.Operation:
    """Applies or skips a step on all replicas alike, then updates the loss scale once.

    Args:
        finite: The common decision of the replicas, a boolean scalar tensor; or True, to apply
            always.
        step: The step, with the gradients of this replica and the scale as it reads that.
        inner: The inner optimizer.
        written: Returns the variables that it may change.
        apply: Divides a list of gradients by the scale and applies it; called in a replica context.
        update: Updates the loss scale, given `finite`. In a branch it is True or False, so that
            most of the update is decided when the step is traced.

    Returns:
        The operation that runs the step in a graph; None in eager mode.
    """
    gradients, scale = step.gradients, step.scale
    if finite is not True and _can_keep_old_values(inner, gradients):
        with _keeping_old_values(written(), finite):
            applied = apply(gradients, scale)
        return grouped(applied, update(finite))
    if not tf.distribute.has_strategy():
        return _branch(finite, lambda: apply(gradients, scale), update)
    if _strategy_supports_no_merge_call():
        # Replicas synchronize to write the counters, which they cannot do inside a branch.
        applied = _branch(finite, lambda: apply(gradients, scale), lambda _: None)
        return grouped(applied, update(finite))

    @do_not_convert
    def in_cross_replica(strategy: Any, finite: ft.Scalar, *own: Any) -> ft.Operation:
        # It is the same on all replicas; their gradients and their scale are their own.
        finite = strategy.experimental_local_results(finite)[0]
        # The branch must be outside the replicas: inside a branch they could not synchronize to
        # sum their gradients.
        run = strategy.extended.call_for_each_replica
        return _branch(finite, lambda: run(apply, args=own), update)

    replica = tf.distribute.get_replica_context()
    return replica.merge_call(in_cross_replica, args=(finite, list(gradients), scale))


def _branch(
    finite: ft.Scalar, apply: Callable[[], object], update: Callable[[ft.Scalar], object]
) -> ft.Operation:
    """Applies or skips, and updates the loss scale; in the branch that takes the step, if any."""
    if finite is True:
        return grouped(apply(), update(True))

    def finished(applied: object, is_applied: bool) -> ft.Tensor:
        results = [applied, update(is_applied)]
        return after(results, lambda: tf.constant(True))

    branch = tf.cond(finite, lambda: finished(apply(), True), lambda: finished(None, False))
    return grouped(_as_one_operation(branch))


def _can_keep_old_values(inner_optimizer: ft.KerasOptimizer, gradients: ft.Gradients) -> bool:
    """Whether the step that is being traced can be skipped by keeping old values.

    Args:
        inner_optimizer: It must be a Keras optimizer, and not a legacy one: others may write to
            variables that they do not list, or with other operations. It must not average
            variables: XLA would round the averages differently after a select.
        gradients: They must be dense: a scattered update has no old value to select.
    """
    return (
        in_xla()
        and not tf.distribute.has_strategy()
        and not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        and not hasattr(inner_optimizer, "_hyper")
        and all(
            type(part).__module__.partition(".")[0] in _KERASES
            and not getattr(part, "use_ema", False)
            for part in (inner_optimizer, *getattr(inner_optimizer, "optimizers", ()))
        )
    )


@contextlib.contextmanager
def _keeping_old_values(variables: Sequence[tf.Variable], finite: ft.Tensor) -> Iterator[None]:
    """Makes assignments to these variables keep the old value unless `finite`.

    Args:
        variables: TensorFlow variables.
        finite: A boolean scalar tensor of the function being traced.
    """
    # A mixed precision variable of tf_keras passes assignments on to the one it holds.
    held = [getattr(variable, "_variable", variable) for variable in map(native, variables)]
    targets = list({id(variable): variable for variable in held}.values())
    for target in targets:
        target.__dict__.update(_choosing_assignments(target, finite))
    try:
        yield
    finally:
        for target in targets:
            for name in ("assign", "assign_add", "assign_sub"):
                target.__dict__.pop(name, None)


def _choosing_assignments(variable: tf.Variable, finite: ft.Tensor) -> dict[str, ft.Function]:
    write = variable.assign

    def assign(value: ft.Array, *args: Any, **kwargs: Any) -> ft.Operation:
        old = variable.read_value()
        value = tf.convert_to_tensor(value, dtype=old.dtype)
        return write(tf.where(finite, value, old), *args, **kwargs)

    def assign_add(delta: ft.Array, *args: Any, **kwargs: Any) -> ft.Operation:
        return assign(variable.read_value() + delta, *args, **kwargs)

    def assign_sub(delta: ft.Array, *args: Any, **kwargs: Any) -> ft.Operation:
        return assign(variable.read_value() - delta, *args, **kwargs)

    return {"assign": assign, "assign_add": assign_add, "assign_sub": assign_sub}


# --- What a forward pass changed ------------------------------------------------------------------


@do_not_convert
def run_guarded(
    models: object, step: ft.Function, counters: ft.Variables, guarded: ft.Variables
) -> ft.Structure:
    """Runs a step of guarded models, and puts weights back if it was skipped.

    Args:
        models: The models, which are not needed here.
        step: Their step, without arguments.
        counters: The numbers of skipped steps of the loss scale optimizers.
        guarded: The weights to put back.

    Returns:
        The result of the step.
    """
    weights = _seen_here(guarded)
    counters = _seen_here(counters)
    # A value that is read is not copied unless the variable is then written in place.
    before, counts = [tf.identity(w) for w in weights], [tf.identity(c) for c in counters]
    result = translated(step)()
    skipped = tf.reduce_any([tf.not_equal(*each) for each in zip(counters, counts, strict=True)])

    def put_back() -> ft.Tensor:
        for weight, value in zip(weights, before, strict=True):
            weight.assign(value, read_value=False)
        return tf.constant(True)

    if in_xla():
        # A branch would copy each of them.
        for weight, value in zip(weights, before, strict=True):
            weight.assign(tf.where(skipped, value, weight), read_value=False)
    else:
        tf.cond(skipped, put_back, lambda: tf.constant(False))
    return result


def trace_call(model: ft.Model, inputs: ft.Structure) -> None:
    """Makes the weights of a model as a call would; tf_keras makes them no earlier."""
    tf.function(lambda: (model(inputs), None)[1], autograph=False).get_concrete_function()


def _seen_here(variables: ft.Variables) -> list[tf.Variable]:
    """TensorFlow's variables behind those of Keras 3 or tf_keras, where replicas have copies each.

    Within a replica its own copies: replicas that assign together could not do so in a branch, and
    would average.
    """
    held = [getattr(each, "_value", getattr(each, "_variable", each)) for each in variables]
    copies = [getattr(each, "values", (each,)) for each in held]
    if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
        return [copy for each in copies for copy in each]
    _, [number] = current_location()
    return [each[number % len(each)] for each in copies]


def _as_one_operation(branch: ft.Tensor) -> ft.Tensor:
    """Keeps TensorFlow from rewriting a branch to a switch for each tensor that enters it.

    A step has hundreds of these tensors, and one operation costs less. But it runs on one device,
    where all of its inputs must be, so with several devices nothing is done.

    Args:
        branch: The result of `tf.cond`, a tensor; in eager mode nothing is done.

    Returns:
        The branch.
    """
    if tf.executing_eagerly() or len(tf.config.list_logical_devices()) > 1:
        return branch
    operation = branch.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    # Without the name, the branch is rewritten, which is only slower.
    if operation.type in ("If", "StatelessIf") and hasattr(operation, "_set_attr"):
        operation._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False))
    return branch

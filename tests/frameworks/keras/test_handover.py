"""The orders of scaling, unscaling and applying where TensorFlow traces, compiles or replicates."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from backends.programs import GRADIENTS, PROGRAMS, WITH_MINIMIZE, Run, expected
from frameworks.keras.support import loss_scale_warnings, number

ALL = {**PROGRAMS, **WITH_MINIMIZE}
# In one trace of all of them, a new loss, a new group and a step of its own follow each other.
LONG = (
    "scale apply:a apply:b hand unscale:ab unscaled:a unscaled:b scale minimize:a apply:a keras:b"
    " scale unscale:a unscaled:a apply:b scale hand unscale:a unscaled:a unscale:b unscaled:b"
)
# XLA takes its time for each step.
IN_XLA = "scale apply:a minimize:a apply:b hand unscale:ab unscaled:a unscaled:b scale keras:ab"


def made(rule=None):
    """Returns a run on an optimizer that was never used.

    A fixed scale, unless told otherwise: which gradients are scaled is found out before any rule is
    asked, and a step that branches takes several times as long to trace.
    """
    variables = {name: keras.Variable([0.0], name=name) for name in "ab"}
    rule = rule or lossscale.FixedScale(2.0**15)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), rule=rule)
    optimizer.build(list(variables.values()))
    return Run(optimizer, variables)


def gone(run):
    return {name: number(variable) for name, variable in run.variables.items()}


def times(count, program):
    return {name: count * value for name, value in expected(program).items()}


# --- All in one function --------------------------------------------------------------------------


@pytest.mark.parametrize("program", ALL)
def test_a_traced_program_applies_each_gradient_once(program):
    run = made()
    step = tf.function(lambda: run.calls(program), autograph=False)
    with loss_scale_warnings() as messages:
        step()
        step()
    assert gone(run) == times(2, program)
    assert len(messages) == (ALL[program] is not None)


@pytest.mark.parametrize("kind", ["xla", "loop"])
def test_a_long_program_in_xla_and_in_a_loop(kind):
    if kind == "xla":
        run, program = made(lossscale.DynamicScale()), IN_XLA
        step = tf.function(lambda: run.calls(program), jit_compile=True)
    else:
        run, program = made(), LONG

        @tf.function
        def step():
            for _ in tf.range(1):
                run.calls(program)

    with loss_scale_warnings() as messages:
        step()
        step()
    assert gone(run) == times(2, program)
    assert messages == []


# --- Halves in different graphs -------------------------------------------------------------------

GROUPED = ["scale | apply:a apply:b", "hand unscale:ab | unscaled:a unscaled:b"]


def split(run, program, first, second):
    """Returns a step whose halves are each run as they are or as functions."""
    before, after = (half.strip() for half in program.split("|"))

    def derive():
        run.calls(before)
        return [{**run.of_scaled}, {**run.divided}]

    def each(call):
        def apply(of_scaled, divided):
            run.of_scaled, run.divided = of_scaled, divided
            run.calls(call)

        return second(apply)

    derive, appliers = first(derive), [each(call) for call in after.split()]

    def step():
        found = derive()
        for apply in appliers:
            apply(*found)

    return step


def plain(function):
    return function


@pytest.mark.parametrize("outer", [plain, tf.function], ids=["alone", "nested"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(tf.function, plain), (plain, tf.function), (tf.function, tf.function)],
    ids=["apply_outside", "apply_inside", "two_functions"],
)
@pytest.mark.parametrize("program", GROUPED)
def test_groups_are_applied_in_other_graphs_than_their_loss_was_scaled_in(
    program, first, second, outer
):
    run = made()
    step = outer(split(run, program, first, second))
    with loss_scale_warnings() as messages:
        for _ in range(3):
            step()
    assert gone(run) == times(3, program.replace("|", ""))
    assert messages == []


def test_a_stale_mark_before_a_traced_half_is_a_warning():
    # Traced, get_unscaled_gradients() says nothing on later calls; scale_loss() outside does.
    run = made()
    step = split(run, GROUPED[1], tf.function, plain)
    with loss_scale_warnings() as messages:
        step()
        assert messages == []
        run.calls("scale")
        step()
    assert len(messages) == 1
    assert "cannot tell" in messages[0]


def test_a_function_that_applies_by_itself_leaves_a_mark_that_is_used_with_a_warning_only():
    run = made()
    step = tf.function(lambda: run.calls("scale apply:a"))
    with loss_scale_warnings() as messages:
        step()
        run.calls("plain:b")
    assert len(messages) == 1
    assert "cannot tell" in messages[0]
    assert gone(run) == {"a": -1.0, "b": -GRADIENTS["b"] / 2**15}


def test_an_unscaled_group_beside_a_traced_scaled_one():
    # One variable's gradients come scaled out of a function, the other's are unscaled by hand.
    run = made()
    scaled = split(run, "scale | apply:a", tf.function, plain)
    with loss_scale_warnings() as messages:
        for _ in range(3):
            scaled()
            run.calls("hand unscale:b unscaled:b")
    assert gone(run) == {"a": -3.0, "b": 0.75}
    assert messages == []


# --- Replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_each_replica_has_marks_of_its_own(two_replicas, in_function):
    with two_replicas.scope():
        run = made()

    def replica_step():
        # What one replica holds is no tensor of the other.
        own = Run(run.optimizer, run.variables)
        own.calls("scale apply:a apply:b hand unscale:ab unscaled:a unscaled:b minimize:a")
        own.calls("scale hand unscale:a unscaled:a unscale:b unscaled:b scale unscale:a unscaled:a")
        own.calls("apply:b")

    step = lambda: two_replicas.run(replica_step)  # noqa: E731
    step = tf.function(step) if in_function else step
    with loss_scale_warnings() as messages:
        step()
        step()
    # The gradients of both replicas are summed: five of `a`, four of `b`, two steps.
    assert gone(run) == {"a": -2 * 2 * 5.0, "b": 2 * 2 * 4 * 0.25}
    assert messages == []


# --- What a subclass overrides --------------------------------------------------------------------


class Noting(lossscale.LossScaleOptimizer):
    """Notes which of its methods are called."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def get_scaled_loss(self, loss):
        self.calls.append("get_scaled_loss")
        return super().get_scaled_loss(loss)

    def get_unscaled_gradients(self, grads):
        self.calls.append("get_unscaled_gradients")
        return super().get_unscaled_gradients(grads)

    def get_gradients(self, loss, params):
        self.calls.append("get_gradients")
        return super().get_gradients(loss, params)

    def apply_gradients(self, grads_and_vars):
        self.calls.append("apply_gradients")
        return super().apply_gradients(grads_and_vars)


class Own(Noting):
    """Does all by itself: another scale, and an answer of its own."""

    def get_scaled_loss(self, loss):
        self.calls.append("get_scaled_loss")
        return lambda: loss() * 7.0

    def get_unscaled_gradients(self, grads):
        self.calls.append("get_unscaled_gradients")
        return [g / 7.0 for g in grads]

    def apply_gradients(self, grads_and_vars):
        super().apply_gradients([(2.0 * g, v) for g, v in grads_and_vars])
        return "applied"


CALLS = {
    "minimize": ["get_scaled_loss", "get_unscaled_gradients", "apply_gradients"],
    "get_gradients": ["get_gradients", "get_scaled_loss", "get_unscaled_gradients"],
    "get_updates": [
        "get_gradients",
        "get_scaled_loss",
        "get_unscaled_gradients",
        "apply_gradients",
    ],
}


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("cls", [Noting, Own])
@pytest.mark.parametrize("verb", CALLS)
def test_every_verb_calls_what_a_subclass_overrides(verb, cls, stale):
    optimizer, weight = cls(keras.optimizers.SGD(1.0)), keras.Variable([1.0])
    with loss_scale_warnings() as messages:
        if stale:
            optimizer.scale_loss(1.0)
        returned = getattr(optimizer, verb)(lambda: tf.reduce_sum(weight.value * 0.25), [weight])
    assert optimizer.calls == CALLS[verb]
    factor = 2.0 if cls is Own else 1.0
    if verb == "get_gradients":
        np.testing.assert_allclose(returned[0].numpy(), [0.25])
    else:
        np.testing.assert_allclose(weight.numpy(), [1.0 - 0.25 * factor])
        given = returned if verb == "minimize" else returned[0]
        assert given == "applied" if cls is Own else int(given) == 1
    assert messages == []


def test_minimize_leaves_statistics_that_are_overwritten_alone():
    plain_weight, statistic = keras.Variable([1.0]), keras.Variable([2.0])
    statistic.overwrite_with_gradient = True
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0))

    @tf.custom_gradient
    def loss():
        def backward(upstream, variables):
            return [], [tf.fill([1], upstream * 0.5), tf.constant([7.0])]

        return tf.reduce_sum(plain_weight.value + statistic.value), backward

    optimizer.minimize(loss, [plain_weight, statistic])
    assert (plain_weight.numpy().item(), statistic.numpy().item()) == (0.5, 7.0)

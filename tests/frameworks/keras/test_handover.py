"""The orders of scaling, unscaling and applying where TensorFlow traces, compiles or replicates."""

import pytest
import tensorflow as tf

import lossscale
from backends.programs import PROGRAMS, WITH_MINIMIZE, Run, expected, made
from frameworks.keras.support import loss_scale_warnings

ALL = {**PROGRAMS, **WITH_MINIMIZE}
# Which gradients are scaled is found out before any rule is asked, and a step that branches takes
# several times as long to trace.
FIXED = lossscale.FixedScale(2.0**15)


@pytest.mark.parametrize("program", ALL)
def test_a_traced_program_applies_each_gradient_once(program):
    run = made(rule=FIXED)
    step = tf.function(lambda: run.calls(program), autograph=False)
    with loss_scale_warnings() as messages:
        step()
        step()
    assert run.gone() == expected(program, 2)
    assert len(messages) == (ALL[program] is not None)


def plain(function):
    return function


# Where gradients are computed, where they are applied, and what runs both.
PLACES = {
    "eager": (plain, plain, plain),
    "apply_outside": (tf.function, plain, plain),
    "apply_inside": (plain, tf.function, plain),
    "two_functions": (tf.function, tf.function, plain),
    "computed_in_a_nested_function": (tf.function, plain, tf.function),
    "applied_in_a_nested_function": (plain, tf.function, tf.function),
    "nested_functions": (tf.function, tf.function, tf.function),
}
WITH_TRACED_HALVES = [place for place, halves in PLACES.items() if tf.function in halves[:2]]


def split(run, program, place):
    """Returns a step whose halves, parted by a bar, run in these places."""
    first, second, both = PLACES[place]
    before, _, after = program.partition("|")

    @first
    def derive():
        run.calls(before)
        return [{**run.of_scaled}, {**run.divided}]

    def each(call):
        def apply(of_scaled, divided):
            run.of_scaled, run.divided = of_scaled, divided
            run.calls(call)

        return second(apply)

    appliers = [each(call) for call in after.split()]

    def step():
        found = derive()
        for apply in appliers:
            apply(*found)

    return both(step)


GROUPED = ["scale | apply:a apply:b", "hand unscale:ab | unscaled:a unscaled:b"]


@pytest.mark.parametrize("place", WITH_TRACED_HALVES)
@pytest.mark.parametrize("program", GROUPED)
def test_groups_are_applied_in_other_graphs_than_their_loss_was_scaled_in(program, place):
    run = made(rule=FIXED)
    step = split(run, program, place)
    with loss_scale_warnings() as messages:
        for _ in range(3):
            step()
    assert run.gone() == expected(program.replace("|", ""), 3)
    assert messages == []


# Gradients of one kind come out of a tf.function, which notes nothing on later steps.
UNKNOWN = {
    "scaled_after_unscaled_ones": ("hand unscale:ab | unscaled:a", "scale apply:b"),
    "unscaled_after_scaled_ones": ("scale | apply:a", "hand unscale:b unscaled:b"),
    "both_out_of_functions": ("scale | apply:a", "hand unscale:b | unscaled:b"),
    "left_by_a_function_that_applies": ("scale apply:a |", "plain:b"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_gradients_of_either_kind_beside_a_traced_half_are_an_error_that_says_what_to_write(case):
    first, second = UNKNOWN[case]
    run = made(rule=FIXED)
    step = split(run, first, "apply_outside")
    for _ in range(2):
        step()
    gone = run.gone()
    second = split(run, second, "apply_outside" if "|" in second else "eager")
    with pytest.raises(ValueError, match=r"cannot tell.*Call apply_gradients\(\) inside"):
        second()
    assert run.gone() == gone == {"a": -2.0, "b": 0.0}
    run.calls("minimize:ab")
    assert run.gone() == {"a": -3.0, "b": 0.25}


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_each_replica_has_marks_of_its_own(two_replicas, in_function):
    with two_replicas.scope():
        run = made(rule=FIXED)

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
    assert run.gone() == {"a": -2 * 2 * 5.0, "b": 2 * 2 * 4 * 0.25}
    assert messages == []

"""Scaled or unscaled: each order of the calls moves each variable by its gradient, once."""

import keras
import pytest
import tensorflow as tf

import lossscale
from backends.programs import PROGRAMS, WITH_MINIMIZE, expected, made
from backends.support import BACKEND
from kerases import loss_scale_warnings

FIXED = lossscale.FixedScale(2.0**15)
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="about its functions")


@pytest.mark.parametrize("way", ["eager", pytest.param("traced", marks=on_tensorflow)])
@pytest.mark.parametrize(("program", "warning"), (PROGRAMS | WITH_MINIMIZE).items())
def test_a_program_applies_each_gradient_once(program, warning, way):
    # A step that branches takes several times as long to trace, and no rule is asked here.
    run = made(**({"rule": FIXED} if way == "traced" else {}))

    def step():
        run.calls(program)

    if way == "traced":
        step = tf.function(step, autograph=False)
    with loss_scale_warnings() as messages:
        # One that does not warn does the same when it runs again, and so does a graph.
        for times in range(1, 2 if warning and way == "eager" else 4):
            step()
            assert run.gone() == expected(program, times)
    assert len(messages) == (warning is not None)
    assert all(warning in message for message in messages)


# What A and B call on one loss, of which A has scaled the whole; and what says so.
OF_ANOTHER = {
    "apply_gradients": ("scale apply:a", "apply:b"),
    "apply": ("scale keras:a", "keras:b"),
    "get_unscaled_gradients": ("hand unscale:a unscaled:a", "unscale:b unscaled:b"),
    "get_unscaled_gradients, in another order": ("hand", "unscale:b"),
}


@pytest.mark.parametrize("reads", [False, True], ids=["", "after reading"])
@pytest.mark.parametrize("calls", OF_ANOTHER)
def test_gradients_of_a_loss_that_another_optimizer_scaled_are_an_error(calls, reads):
    by_first, by_second = OF_ANOTHER[calls]
    first = made()
    second = made({"b": first.variables["b"]})
    first.calls(by_first)
    second.of_scaled = first.of_scaled
    if reads:
        # A program may log the scale, and a debugger prints.
        assert repr(second.optimizer)
        assert second.optimizer.loss_scale
    with pytest.raises(ValueError, match=f"{calls.split(',')[0]}.*MultiOptimizer") as error:
        second.calls(by_second)
    assert isinstance(error.value, lossscale.LossScaleError)
    assert second.gone() == {"b": 0.0}
    # Of a loss of its own.
    second.calls("scale apply:b")
    assert second.gone() == {"b": 0.25}


def test_one_optimizer_may_unscale_the_gradients_of_another():
    first = made()
    second = made({"b": first.variables["b"]})
    # Without a warning that it has scaled no loss itself, which would be an error.
    for _ in range(2):
        first.calls("hand unscale:ab unscaled:a")
        second.divided = first.divided
        second.calls("unscaled:b")
    assert first.gone() == {"a": -2.0, "b": 0.5}
    # None of them is left.
    with pytest.warns(lossscale.LossScaleWarning, match="the loss was never scaled"):
        second.calls("unscaled:b")


def test_an_optimizer_of_another_model_is_not_taken_for_one_of_the_same_loss():
    # One that is made after a loss was scaled.
    first = made()
    first.calls("scale apply:ab")
    second = made()
    with pytest.warns(lossscale.LossScaleWarning, match="the loss was never scaled"):
        second.calls("plain:a")
    # Gradients that the other one unscaled before this one was made are not its own.
    first.calls("hand unscale:ab")
    with pytest.warns(lossscale.LossScaleWarning, match="the loss was never scaled"):
        made().calls("plain:a")


def test_a_program_may_multiply_by_the_scale_itself():
    by_hand = made()
    by_hand.take(by_hand.loss() * by_hand.optimizer.loss_scale)
    by_hand.calls("unscale:ab unscaled:ab keras:a")
    assert by_hand.gone() == {"a": -2.0, "b": 0.25}
    # Not among others: which of them scaled a loss is known by their methods alone.
    other, first = made(), made()
    first.calls("scale")
    other.take(other.loss() * other.optimizer.loss_scale)
    with pytest.raises(ValueError, match=r"call get_scaled_loss\(\) of this optimizer"):
        other.calls("unscale:ab")


@pytest.mark.parametrize("verb", ["minimize", "get_gradients", "get_updates"])
@pytest.mark.parametrize("scale", ["get_scaled_loss", "scale_loss"])
def test_a_loss_that_is_scaled_twice_is_a_warning_once(verb, scale):
    run = made()
    variable = run.variables["a"]

    def loss():
        return getattr(run.optimizer, scale)(keras.ops.sum(variable.value * 2.0))

    with pytest.warns(match="scaled twice"):
        getattr(run.optimizer, verb)(loss, [variable])
    # A second warning would be an error.
    getattr(run.optimizer, verb)(loss, [variable])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_of_none_uses_nothing_up():
    run = made()
    run.calls("scale")
    a, b = run.variables["a"], run.variables["b"]
    run.optimizer.apply_gradients([(run.of_scaled["a"], a), (None, b)])
    run.optimizer.apply_gradients([(None, a), (run.of_scaled["b"], b)])
    assert run.gone() == {"a": -1.0, "b": 0.25}


# --- Halves of a step in functions and graphs of their own ----------------------------------------


def plain(function):
    return function


# Where gradients are computed, where they are applied, and what runs both.
PLACES = {
    "apply_outside": (tf.function, plain, plain),
    "apply_inside": (plain, tf.function, plain),
    "two_functions": (tf.function, tf.function, plain),
    "computed_in_a_nested_function": (tf.function, plain, tf.function),
    "applied_in_a_nested_function": (plain, tf.function, tf.function),
    "nested_functions": (tf.function, tf.function, tf.function),
}
EAGER = (plain, plain, plain)


def split(run, program, places):
    """Returns a step whose halves, parted by a bar, run in these places."""
    first, second, both = places
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


@on_tensorflow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", GROUPED)
def test_groups_are_applied_in_other_graphs_than_their_loss_was_scaled_in(program, place):
    run = made(rule=FIXED)
    step = split(run, program, PLACES[place])
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


@on_tensorflow
@pytest.mark.parametrize("case", UNKNOWN)
def test_gradients_of_either_kind_beside_a_traced_half_are_an_error_that_says_what_to_write(case):
    first, second = UNKNOWN[case]
    run = made(rule=FIXED)
    step = split(run, first, PLACES["apply_outside"])
    for _ in range(2):
        step()
    gone = run.gone()
    second = split(run, second, PLACES["apply_outside"] if "|" in second else EAGER)
    with pytest.raises(ValueError, match=r"cannot tell.*Call apply_gradients\(\) inside"):
        second()
    assert run.gone() == gone == {"a": -2.0, "b": 0.0}
    run.calls("minimize:ab")
    assert run.gone() == {"a": -3.0, "b": 0.25}

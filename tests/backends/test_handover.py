"""Scaled or unscaled: each order of the calls moves each variable by its gradient, once."""

import warnings

import keras
import numpy as np
import pytest

import lossscale
from backends.programs import PROGRAMS, WITH_MINIMIZE, expected, made
from backends.support import BACKEND, number, wrapped


def check(program, warning, times=1):
    run = made()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            run.calls(program)
    assert run.gone() == expected(program, times)
    messages = [
        str(w.message) for w in caught if issubclass(w.category, lossscale.LossScaleWarning)
    ]
    assert len(messages) == (warning is not None)
    assert all(warning in message for message in messages)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_applies_each_gradient_once(program):
    check(program, PROGRAMS[program])


@pytest.mark.parametrize("program", [p for p, warning in PROGRAMS.items() if warning is None])
def test_a_program_that_runs_again_does_the_same(program):
    check(program, None, times=3)


@pytest.mark.parametrize("program", WITH_MINIMIZE)
def test_minimize_is_a_step_of_its_own(program):
    check(program, WITH_MINIMIZE[program])


def test_two_optimizers_share_nothing():
    # A GAN: each scales its own loss on one tape, then each applies.
    variables = {name: keras.Variable([0.0], name=name) for name in "ab"}
    left, right = made({"a": variables["a"]}), made({"b": variables["b"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            left.calls("scale")
            right.calls("scale")
            left.calls("apply:a")
            right.calls("apply:b")
    assert left.gone() | right.gone() == {"a": -2.0, "b": 0.5}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_of_none_uses_nothing_up():
    run = made()
    run.calls("scale")
    a, b = run.variables["a"], run.variables["b"]
    run.optimizer.apply_gradients([(run.of_scaled["a"], a), (None, b)])
    run.optimizer.apply_gradients([(None, a), (run.of_scaled["b"], b)])
    assert run.gone() == {"a": -1.0, "b": 0.25}


def test_a_call_that_fails_uses_nothing_up():
    run = made()
    run.calls("scale")
    stranger = keras.Variable([0.0])
    pairs = [(run.of_scaled["a"], run.variables["a"]), (run.of_scaled["b"], stranger)]
    with pytest.raises(ValueError, match=r"[Uu]nknown variable"):
        run.optimizer.apply_gradients(pairs)
    run.calls("apply:a apply:b")
    assert run.gone() == {"a": -1.0, "b": 0.25}


@pytest.mark.skipif(BACKEND == "jax", reason="there the state goes through stateless_apply")
def test_apply_gradients_returns_the_number_of_steps():
    # Keras' own class returns a counter of its own, which stays 0.
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    variable = keras.Variable([1.0])
    for steps, value in ((1, 1.0), (2, np.nan)):
        scaled = optimizer.scale_loss(keras.ops.convert_to_tensor([value]))
        assert number(optimizer.apply_gradients([(scaled, variable)])) == steps

"""Scaled or unscaled: each order of the calls moves each variable by its gradient, once."""

import warnings

import keras
import numpy as np
import pytest

import lossscale
from backends.programs import PROGRAMS, WITH_MINIMIZE, Run, expected
from backends.support import BACKEND, arrays, wrapped

on_jax = pytest.mark.skipif(BACKEND != "jax", reason="about JAX")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="about PyTorch")


def made(variables=None):
    """Returns a run on an optimizer that was never used, around the plainest SGD."""
    variables = variables or {name: keras.Variable([0.0], name=name) for name in "ab"}
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(list(variables.values()))
    return Run(optimizer, variables)


def gone(run):
    return {name: arrays([variable])[0].item() for name, variable in run.variables.items()}


def warned(caught):
    return [str(w.message) for w in caught if issubclass(w.category, lossscale.LossScaleWarning)]


def check(run, program, warning, times=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            run.calls(program)
    assert gone(run) == {name: times * value for name, value in expected(program).items()}
    messages = warned(caught)
    if warning is None:
        assert messages == []
    else:
        assert len(messages) == 1
        assert warning in messages[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_applies_each_gradient_once(program):
    check(made(), program, PROGRAMS[program])


@pytest.mark.parametrize("program", [p for p, warning in PROGRAMS.items() if warning is None])
def test_a_program_that_runs_again_does_the_same(program):
    check(made(), program, None, times=3)


@pytest.mark.skipif(BACKEND == "jax", reason="there a loss has to be a function of arrays")
@pytest.mark.parametrize("program", WITH_MINIMIZE)
def test_minimize_is_a_step_of_its_own(program):
    check(made(), program, WITH_MINIMIZE[program])


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
    assert (gone(left)["a"], gone(right)["b"]) == (-2.0, 0.5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_of_none_uses_nothing_up():
    run = made()
    run.calls("scale")
    a, b = run.variables["a"], run.variables["b"]
    run.optimizer.apply_gradients([(run.of_scaled["a"], a), (None, b)])
    run.optimizer.apply_gradients([(None, a), (run.of_scaled["b"], b)])
    assert gone(run) == {"a": -1.0, "b": 0.25}


def test_a_call_that_fails_uses_nothing_up():
    run = made()
    run.calls("scale")
    stranger = keras.Variable([0.0])
    pairs = [(run.of_scaled["a"], run.variables["a"]), (run.of_scaled["b"], stranger)]
    with pytest.raises(ValueError, match=r"[Uu]nknown variable"):
        run.optimizer.apply_gradients(pairs)
    run.calls("apply:a apply:b")
    assert gone(run) == {"a": -1.0, "b": 0.25}


@on_jax
def test_gradients_out_of_a_compiled_function_are_scaled_on_every_call():
    import jax

    run = made()
    optimizer = run.optimizer

    @jax.jit
    def scaled_gradients(state):
        with keras.StatelessScope(list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(run._loss())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            run._take(scaled_gradients([v.value for v in optimizer.variables]))
            run.calls("apply:a apply:b")
    assert gone(run) == {"a": -3.0, "b": 0.75}


# --- PyTorch: a `.grad` belongs to whoever filled it ----------------------------------------------


def backward(optimizer, weight, factor=1.0):
    optimizer.scale_loss((weight.value * factor).sum()).backward()


def refill_by_data(weight, value):
    weight.value.grad.data = value


def refill_in_data(weight, value):
    weight.value.grad.data.copy_(value)


def refill_in_place(weight, value):
    weight.value.grad.copy_(value)


def refill_under_no_grad(weight, value):
    import torch

    with torch.no_grad():
        weight.value.grad.zero_().add_(value)


def refill_by_numpy(weight, value):
    weight.value.grad.numpy()[:] = value.numpy()


@on_torch
@pytest.mark.parametrize("scales_each", [True, False])
@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize(
    "refill",
    [refill_by_data, refill_in_data, refill_in_place, refill_under_no_grad, refill_by_numpy],
)
def test_a_grad_that_is_filled_again_is_divided_again(refill, fixed, scales_each):
    import torch

    rule = {"dynamic": False, "initial_scale": 2.0**10} if fixed else {"initial_scale": 2.0**10}
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), **rule)
    weight = keras.Variable([0.0, 0.0])
    weight.value.grad = torch.zeros(2)
    optimizer.scale_loss(1.0)
    for _ in range(3):
        if scales_each:
            optimizer.scale_loss(1.0)
        refill(weight, torch.tensor([2.0**10, 2.0**9]))
        optimizer.apply([weight.value.grad], [weight])
    assert arrays([weight])[0].tolist() == [-3.0, -1.5]


@on_torch
def test_a_grad_that_is_handed_in_twice_is_the_same_step_twice():
    optimizer, weight = wrapped(keras.optimizers.SGD(1.0)), keras.Variable([0.0])
    backward(optimizer, weight)
    for expected_weight in (-1.0, -2.0):
        optimizer.apply([weight.value.grad], [weight])
        assert arrays([weight])[0].tolist() == [expected_weight]
    assert weight.value.grad.tolist() == [2.0**10]


@on_torch
def test_a_skipped_grad_can_be_mended_and_applied():
    optimizer, weight = wrapped(keras.optimizers.SGD(1.0)), keras.Variable([0.0, 0.0])
    backward(optimizer, weight)
    weight.value.grad[0] = np.inf
    optimizer.apply([weight.value.grad], [weight])
    assert arrays([weight])[0].tolist() == [0.0, 0.0]
    # The skip halved the scale; the gradient is of the loss as it was scaled before.
    weight.value.grad.data[0] = 2.0**10
    optimizer.apply([weight.value.grad * 0.5], [weight])
    assert arrays([weight])[0].tolist() == [-1.0, -1.0]


@on_torch
def test_gradients_add_up_in_a_grad_that_is_kept():
    optimizer, weight = wrapped(keras.optimizers.SGD(1.0)), keras.Variable([0.0])
    for factor in (1.0, 2.0, 4.0):
        backward(optimizer, weight, factor)
    optimizer.apply([weight.value.grad], [weight])
    assert arrays([weight])[0].tolist() == [-7.0]
    # Nobody emptied it: what was there is added to.
    backward(optimizer, weight)
    optimizer.apply([weight.value.grad], [weight])
    assert arrays([weight])[0].tolist() == [-15.0]


@on_torch
def test_a_grad_that_was_unscaled_by_hand_goes_to_apply_gradients():
    optimizer, weight = wrapped(keras.optimizers.SGD(1.0)), keras.Variable([0.0])
    for step in range(1, 4):
        backward(optimizer, weight)
        (unscaled,) = optimizer.get_unscaled_gradients([weight.value.grad])
        # In place and out of sight, as a clipping loop does it.
        weight.value.grad.data.copy_(unscaled)
        optimizer.apply_gradients([(weight.value.grad, weight)])
        weight.value.grad.zero_()
        assert arrays([weight])[0].tolist() == [-step]


@on_torch
def test_copied_gradients_of_several_groups_do_not_meet():
    import torch

    optimizer = wrapped(keras.optimizers.SGD(1.0))
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in ((3,), (2,), (2,))]
    given = [torch.full(tuple(w.shape), 2.0 ** (10 + i)) for i, w in enumerate(weights)]
    optimizer.build(weights)
    for part in (slice(None), slice(0, 1), slice(1, 3), slice(2, 3), slice(1, 2)):
        optimizer.scale_loss(1.0)
        optimizer.apply(given[part], weights[part])
    assert [g.unique().tolist() for g in given] == [[2.0**10], [2.0**11], [2.0**12]]
    # The scale was doubled after three steps, so that a fourth and fifth weigh half.
    halves = [2.0, 2 * 2 + 1.0, 4 * 2 + 2.0]
    assert [w.unique().tolist() for w in map(torch.tensor, arrays(weights))] == [
        [-h] for h in halves
    ]

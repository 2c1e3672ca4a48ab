"""Keras on PyTorch: a `.grad` belongs to whoever filled it, and the host moves the state."""

import math

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lossscale
from backends.support import arrays, number, wrapped
from lossscale.rules import LARGEST_SCALE, LONGEST_INTERVAL, SMALLEST_SCALE

if keras.backend.backend() != "torch":
    pytest.skip("about PyTorch", allow_module_level=True)

import torch

# --- Gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_step_reads_the_decision_and_the_two_numbers_of_the_rule(dynamic, monkeypatch):
    rule = lossscale.DynamicScale(8.0) if dynamic else lossscale.FixedScale(8.0)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.01), rule=rule)
    variables = [keras.Variable(np.ones((4, 4), "float32")) for _ in range(5)]
    gradients = [torch.ones(4, 4) for _ in variables]
    optimizer.scale_loss(1.0)
    optimizer.apply(gradients, variables)
    lists = []
    tolist = torch.Tensor.tolist
    # On a CPU that is no operation the profiler sees.
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append(1) or tolist(self))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.apply(gradients, variables)
    counts = {event.key: event.count for event in profile.key_averages()}
    waits = counts.get("aten::_local_scalar_dense", 0) + len(lists)
    assert waits == (3 if dynamic else 0)


def backward(optimizer, weight, factor=1.0):
    optimizer.scale_loss((weight.value * factor).sum()).backward()


REFILLS = {
    "by_data": lambda grad, value: setattr(grad, "data", value),
    "in_data": lambda grad, value: grad.data.copy_(value),
    "in_place": lambda grad, value: grad.copy_(value),
    "under_no_grad": torch.no_grad()(lambda grad, value: grad.zero_().add_(value)),
    "by_numpy": lambda grad, value: np.copyto(grad.numpy(), value.numpy()),
}


@pytest.mark.parametrize("scales_each", [True, False])
@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("refill", REFILLS.values(), ids=REFILLS)
def test_a_grad_that_is_filled_again_is_divided_again(refill, fixed, scales_each):
    optimizer = lossscale.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), dynamic=not fixed, initial_scale=2.0**10
    )
    weight = keras.Variable([0.0, 0.0])
    weight.value.grad = torch.zeros(2)
    optimizer.scale_loss(1.0)
    for _ in range(3):
        if scales_each:
            optimizer.scale_loss(1.0)
        refill(weight.value.grad, torch.tensor([2.0**10, 2.0**9]))
        optimizer.apply([weight.value.grad], [weight])
    assert arrays([weight])[0].tolist() == [-3.0, -1.5]


def test_a_grad_is_taken_as_it_is_now_and_left_alone():
    optimizer, weight = wrapped(keras.optimizers.SGD(1.0)), keras.Variable([0.0])

    def apply():
        optimizer.apply([weight.value.grad], [weight])
        return float(arrays([weight])[0][0])

    backward(optimizer, weight)
    # Handed in twice it is the same step twice.
    assert (apply(), apply()) == (-1.0, -2.0)
    assert weight.value.grad.tolist() == [2.0**10]
    # Nobody emptied it: what was there is added to.
    for factor in (2.0, 4.0):
        backward(optimizer, weight, factor)
    assert apply() == -9.0
    # After three steps the scale was doubled, and a skip halves it.
    weight.value.grad[0] = np.inf
    assert apply() == -9.0
    weight.value.grad.data[0] = 2.0**10
    assert apply() == -10.0


def test_copied_gradients_of_several_groups_do_not_meet():
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in ((3,), (2,), (2,))]
    given = [torch.full(tuple(w.shape), 2.0 ** (10 + i)) for i, w in enumerate(weights)]
    optimizer.build(weights)
    for part in (slice(None), slice(0, 1), slice(1, 3), slice(2, 3), slice(1, 2)):
        optimizer.scale_loss(1.0)
        optimizer.apply(given[part], weights[part])
    assert [g.unique().tolist() for g in given] == [[2.0**10], [2.0**11], [2.0**12]]
    # The scale was doubled after three steps, so that a fourth and fifth weigh half.
    expected = [-2.0, -(2 * 2 + 1.0), -(4 * 2 + 2.0)]
    assert [set(w.tolist()) for w in arrays(weights)] == [{value} for value in expected]


# --- The state that the host moves is the one that the rule's own operations give -----------------

any_scale = st.one_of(
    st.floats(width=32, min_value=0),
    st.integers(-126, 126).map(lambda power: 2.0**power),
    st.sampled_from([math.inf, math.nan, -1.0, SMALLEST_SCALE, LARGEST_SCALE]),
)
counts = st.integers(0, 5) | st.integers(LONGEST_INTERVAL - 3, LONGEST_INTERVAL - 1)
powers = st.integers(1, 30).map(lambda power: 2.0**power)
rules = st.builds(
    lossscale.DynamicScale,
    initial_scale=st.just(2.0**15),
    growth_interval=st.integers(1, 5) | st.just(LONGEST_INTERVAL),
    growth_factor=powers,
    backoff_factor=powers.map(lambda factor: 1 / factor),
    min_scale=st.sampled_from([SMALLEST_SCALE, 1.0, 2.0**15]),
    max_scale=st.sampled_from([None, 2.0**15, 2.0**24]),
)


@settings(deadline=None)
@example(lossscale.DynamicScale(), -1.0, 0, True, False)  # 1.0 marks an overflow.
@given(rules, any_scale, counts, st.booleans(), st.booleans())
def test_the_host_moves_the_state_as_the_rule_does(rule, scale, good_steps, finite, last_skipped):
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), rule=rule)
    weight = keras.Variable([1.0, 2.0])
    optimizer.build([weight])
    optimizer._state.write(lossscale.ScaleState(scale, good_steps))
    optimizer._last_step_skipped.assign(last_skipped)
    optimizer.iterations = 7
    before = optimizer._state.read()

    weight.value.grad = torch.tensor([0.0, 0.0 if finite else math.inf])
    optimizer.scale_loss(1.0)
    optimizer.apply([weight.value.grad], [weight])

    # Zero divided by a scale that is NaN, or so small that its reciprocal is infinite, is NaN.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        applied = finite and bool(np.isfinite(np.float32(0) * np.reciprocal(np.float32(scale))))
    expected = rule.update(before, torch.tensor(applied), xp=torch)
    found = optimizer._state.read()
    np.testing.assert_array_equal(number(found.scale), number(expected.scale))
    assert number(found.good_steps) == number(expected.good_steps)
    assert bool(optimizer.last_step_skipped) is not applied
    assert number(optimizer.steps_skipped) == 1 - applied
    assert number(optimizer.iterations) == 8
    assert number(optimizer.inner_optimizer.iterations) == 7 + applied


def test_values_that_are_passed_in_and_out_move():
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    values = [v.value.clone() for v in optimizer.variables]
    gradient = optimizer.scale_loss(keras.ops.convert_to_tensor([math.inf]))
    _, after = optimizer.stateless_apply(values, [gradient], [weight.value])
    names = [v.name for v in optimizer.variables]
    assert number(after[names.index("dynamic_scale")]) == 2.0
    assert number(optimizer.loss_scale) == 4.0


class Keeping(keras.optimizers.SGD):
    """Keeps the gradients of each step, as optimistic optimizers do."""

    def update_step(self, gradient, variable, learning_rate):
        self.__dict__.setdefault("kept", []).append(gradient)
        super().update_step(gradient, variable, learning_rate)


def test_a_gradient_that_an_optimizer_keeps_is_not_overwritten():
    optimizer = lossscale.LossScaleOptimizer(Keeping(1.0), initial_scale=8.0)
    variables = [keras.Variable(np.zeros((1024, 512), "float32")) for _ in range(2)]
    optimizer.build(variables)
    for count in (1, 2):
        optimizer.scale_loss(torch.tensor(1.0))
        optimizer.apply([torch.full((1024, 512), 8.0 * count) for _ in variables], variables)
    assert [float(kept.max()) for kept in optimizer.inner_optimizer.kept] == [1, 1, 2, 2]


def test_a_repr_does_not_wait_for_a_device():
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    assert "loss scale 8" in repr(optimizer)
    # To read a tensor of this device is an error.
    optimizer.dynamic_scale._value = torch.nn.Parameter(torch.ones((), device="meta"), False)
    assert repr(optimizer).endswith("loss scale on the device>")

"""PyTorch: the state that the host moves is the one the rule's own operations give."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale
from backends.support import BACKEND, number
from lossscale.rules import LARGEST_SCALE, LONGEST_INTERVAL, SMALLEST_SCALE, Seen

pytestmark = pytest.mark.skipif(BACKEND != "torch", reason="about PyTorch")

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
@given(rules, any_scale, counts, st.booleans(), st.booleans())
def test_the_host_moves_the_state_as_the_rule_does(rule, scale, good_steps, finite, last_skipped):
    import torch

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
    expected = rule.update(before, Seen(torch.tensor(applied)), xp=torch)
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

import dataclasses
import json
import math
import pickle

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core import oracle
from core.strategies import dynamic_scales, scales
from lossscale.rules import LONGEST_INTERVAL, RULES, DynamicScale, FixedScale, ScaleRule, ScaleState

steps = st.lists(st.sampled_from([True, False, np.True_, np.False_]), max_size=60)
counters = st.sampled_from([np.int32, np.int64])
rules = dynamic_scales() | st.builds(FixedScale, scales, st.booleans())


def next_state(rule, state, finite):
    # NumPy warns of an infinite product, which is meant and is not taken, and of 0 times inf.
    with np.errstate(over="ignore", invalid="ignore"):
        return rule.update(state, finite, xp=np)


def states_of(rule, finite_steps, counter=np.int64):
    scale, good_steps = rule.init()
    states = [ScaleState(np.float32(scale), counter(good_steps))]
    for finite in finite_steps:
        states.append(next_state(rule, states[-1], finite))
        assert isinstance(states[-1], ScaleState)
        assert [number.dtype for number in states[-1]] == [np.float32, counter]
    return states


@given(rule=dynamic_scales(), finite_steps=steps, counter=counters)
@example(rule=DynamicScale(growth_interval=1), finite_steps=[True] * 120, counter=np.int32)
@example(
    rule=DynamicScale(growth_interval=1, min_scale=2.0**-126),
    finite_steps=[False] * 150,
    counter=np.int32,
)
def test_every_sequence_gives_the_bits_of_the_oracle_in_the_range(rule, finite_steps, counter):
    states = states_of(rule, finite_steps, counter)
    expected = [(oracle.float32(rule.initial_scale), 0), *oracle.trace(rule, finite_steps)]
    assert [(float(scale).hex(), int(count)) for scale, count in states] == [
        (scale.hex(), streak) for scale, streak in expected
    ]
    lowest, highest = np.float32(rule.min_scale), np.float32(rule.ceiling)
    for state in states:
        assert lowest <= state.scale <= highest
        reciprocal = np.float32(1) / state.scale
        assert np.finfo(np.float32).tiny <= reciprocal <= np.finfo(np.float32).max
        assert 0 <= state.good_steps < rule.growth_interval
    # As a file would hold it: float32, although the arguments are float64.
    restored = rule.restored(ScaleState(float(state.scale), int(state.good_steps)))
    assert (np.float32(restored.scale), restored.good_steps) == state


@given(rule=dynamic_scales(), finite_steps=steps, stored=st.integers(0, LONGEST_INTERVAL))
def test_every_stored_count_is_taken_up_as_the_oracle_does(rule, finite_steps, stored):
    scale, good_steps = rule.restored(ScaleState(rule.initial_scale, stored))
    state = ScaleState(np.float32(scale), np.int64(good_steps))
    pairs = []
    for finite in finite_steps:
        state = next_state(rule, state, finite)
        pairs.append((float(state.scale), int(state.good_steps)))
    assert pairs == oracle.trace(rule, finite_steps, streak=good_steps)


@given(
    rule=dynamic_scales(),
    scale=st.floats(width=32),
    good_steps=st.integers(0, LONGEST_INTERVAL - 1),
)
@example(rule=DynamicScale(8, min_scale=4, max_scale=16), scale=math.inf, good_steps=1)
@example(rule=DynamicScale(8, min_scale=4), scale=math.nan, good_steps=1)
def test_one_skipped_step_brings_back_a_scale_that_was_set_out_of_range(rule, scale, good_steps):
    state = next_state(rule, ScaleState(np.float32(scale), np.int32(good_steps)), False)
    assert state == oracle.next_state(scale, good_steps, False, **oracle.settings_of(rule))


@given(rule=rules, scale=st.floats(), good_steps=st.integers())
def test_every_stored_state_becomes_one_that_the_rule_can_be_in(rule, scale, good_steps):
    restored = rule.restored(ScaleState(scale, good_steps))
    lowest, highest = (
        (rule.scale, rule.scale) if isinstance(rule, FixedScale) else (rule.min_scale, rule.ceiling)
    )
    assert lowest <= restored.scale <= highest
    assert 0 <= restored.good_steps < LONGEST_INTERVAL
    assert rule.restored(restored) == restored


@given(rule=rules)
def test_every_rule_starts_with_python_numbers_and_is_made_again_from_its_config(rule):
    assert isinstance(rule, ScaleRule)
    assert rule.init()._fields[0] == "scale"
    assert [type(number) for number in rule.init()] == [float, int]
    config = json.loads(json.dumps(rule.get_config(), allow_nan=False))
    again = RULES[type(rule).__name__](**config)
    assert again == rule
    assert hash(again) == hash(rule)
    assert again.get_config() == config


@given(rule=rules, finite=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_update_is_pure(rule, finite, data):
    # Arrays and not scalars, for only those could be changed in place.
    first, _ = rule.init()
    scale = np.full(len(finite), first, np.float32)
    good_steps = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=len(finite), max_size=len(finite)))
    )
    mask = np.array(finite)
    copies = scale.copy(), good_steps.copy(), mask.copy()
    once = next_state(rule, ScaleState(scale, good_steps), mask)
    for array, copy in zip((scale, good_steps, mask), copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    twice = next_state(rule, ScaleState(scale, good_steps), mask)
    np.testing.assert_array_equal(once.scale, twice.scale)
    np.testing.assert_array_equal(once.good_steps, twice.good_steps)


powers = st.integers(-126, 126).map(lambda exponent: 2.0**exponent)


@settings(max_examples=50)
@given(
    rule=st.builds(
        lambda three, interval, growth, backoff: DynamicScale(
            sorted(three)[1], interval, 2.0**growth, 2.0**-backoff, min(three), max(three)
        ),
        st.tuples(powers, powers, powers),
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(1, 9),
    ),
    finite_steps=steps,
)
def test_a_rule_of_powers_of_two_reaches_powers_of_two_only(rule, finite_steps):
    assert rule.powers_of_two
    for state in states_of(rule, finite_steps):
        assert math.frexp(state.scale)[0] == 0.5


@given(rule=dynamic_scales(), waits=st.integers(2, 4), finite_steps=steps, counter=counters)
def test_a_rule_that_waits_for_overflows_gives_the_bits_of_the_oracle(
    rule, waits, finite_steps, counter
):
    rule = dataclasses.replace(rule, overflows_before_backoff=waits)
    scale, good_steps, overflows = rule.init()
    state = type(rule.init())(np.float32(scale), counter(good_steps), counter(overflows))
    pairs, row = [], 0
    for finite in finite_steps:
        state = next_state(rule, state, finite)
        row = 0 if finite else row + 1
        pairs.append((float(state.scale), int(state.good_steps)))
        assert int(state.overflows) == min(row, waits)
        assert [number.dtype for number in state] == [np.float32, counter, counter]
        numbers = type(state)(float(state.scale), int(state.good_steps), int(state.overflows))
        assert tuple(map(np.float32, rule.restored(numbers))) == tuple(map(np.float32, state))
    assert pairs == oracle.trace(rule, finite_steps)
    again = DynamicScale(**json.loads(json.dumps(rule.get_config(), allow_nan=False)))
    assert again == rule == pickle.loads(pickle.dumps(rule))
    assert again.get_config()["overflows_before_backoff"] == waits

import dataclasses
import math

import numpy as np
import pytest

from lossscale.arguments import checked_rule
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.rules import (
    LARGEST_SCALE,
    LONGEST_INTERVAL,
    SMALLEST_SCALE,
    DynamicScale,
    FixedScale,
    ScaleRule,
    ScaleState,
)

OK, BAD = True, False


def started(rule):
    """The first state, as the arrays that a framework would hold."""
    scale, good_steps = rule.init()
    return ScaleState(np.float32(scale), np.int64(good_steps))


def run(rule, finite_steps):
    """The (scale, good_steps) pairs after each step."""
    state, pairs = started(rule), []
    for finite in finite_steps:
        state = rule.update(state, finite, xp=np)
        pairs.append((float(state.scale), int(state.good_steps)))
    return pairs


def test_the_default_is_the_one_tensorflow_documents():
    rule = DynamicScale()
    assert rule.init() == ScaleState(2.0**15, 0)
    assert (rule.growth_interval, rule.growth_factor, rule.backoff_factor) == (2000, 2.0, 0.5)
    assert (rule.min_scale, rule.max_scale, rule.ceiling) == (1.0, None, 2.0**126)


def test_the_scale_moves_as_in_tensorflow_2_0_to_2_21():
    """test_rules_properties.py holds any rule and any steps to an oracle."""
    steps = [OK, OK, OK, BAD, OK, OK, BAD, BAD, BAD]
    expected = [(1, 1), (2, 0), (2, 1), (1, 0), (1, 1), (2, 0), (1, 0), (1, 0), (1, 0)]
    assert run(DynamicScale(1, 2), steps) == expected


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_fixed_scale_never_moves(skip_nonfinite):
    rule = FixedScale(128, skip_nonfinite=skip_nonfinite)
    assert run(rule, [OK, BAD] * 20) == [(128, 0)] * 40


NOT_A_SCALE = [0, -1.0, math.inf, -math.inf, math.nan, "8", True, None, 2.0**127, 2.0**-127]
NOT_AN_INTERVAL = [0, 0.0, -5, 2.5, math.nan, 2.0**31, True, "8", None, math.inf, 2**31]
# float32 rounds the last two to a factor that moves nothing, or to nothing at all.
NO_GROWTH = [1, 1.0, 0.5, 0, -2, math.inf, math.nan, "2", True, None, 1 + 2.0**-25, 1e300]
NO_BACKOFF = [1, 0, 2.0, -0.5, math.inf, math.nan, "0.5", True, None, -0.0, False]
NO_BACKOFF += [1 - 2.0**-26, 1e-60]
WRONG = [
    (FixedScale, "scale", "", NOT_A_SCALE),
    (FixedScale, "skip_nonfinite", "True or False", [0, 1, None, "no"]),
    (DynamicScale, "initial_scale", "", NOT_A_SCALE),
    (DynamicScale, "min_scale", "", NOT_A_SCALE),
    # None stands for the highest scale there is.
    (DynamicScale, "max_scale", "", [value for value in NOT_A_SCALE if value is not None]),
    (DynamicScale, "growth_interval", "an integer", NOT_AN_INTERVAL),
    (DynamicScale, "overflows_before_backoff", "an integer", NOT_AN_INTERVAL),
    (DynamicScale, "growth_factor", "", NO_GROWTH),
    (DynamicScale, "backoff_factor", "", NO_BACKOFF),
]


@pytest.mark.parametrize(
    ("make", "name", "what", "value"), [(*row, value) for *row, values in WRONG for value in values]
)
def test_a_bad_argument_is_a_value_error_that_names_it(make, name, what, value):
    given = {"scale": 8} if name == "skip_nonfinite" else {}
    with pytest.raises(ValueError, match=f"^`{name}` must be {what}") as caught:
        make(**given, **{name: value})
    assert isinstance(caught.value, ArgumentError)
    shown = float(value) if name.endswith("factor") and type(value) is int else value
    assert f"{name}={shown!r}" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"initial_scale": 0.5},
        {"initial_scale": 16, "min_scale": 32},
        {"initial_scale": 64, "max_scale": 32},
        {"initial_scale": 16, "min_scale": 32, "max_scale": 8},
    ],
    ids=repr,
)
def test_a_first_scale_outside_the_range_is_a_value_error(settings):
    with pytest.raises(ValueError, match=r"^`initial_scale` must be between"):
        DynamicScale(**settings)


def test_good_arguments_are_kept_as_numbers_of_python():
    assert FixedScale(SMALLEST_SCALE).scale == 2.0**-126
    assert FixedScale(LARGEST_SCALE).scale == 2.0**126
    for interval in (1, LONGEST_INTERVAL, 2000.0, np.float64(2000), np.float32(2000), np.int64(5)):
        rule = DynamicScale(np.float32(8), interval, max_scale=16)
        assert rule.growth_interval == interval
        types = {field: type(value) for field, value in rule.get_config().items()}
        assert types.pop("growth_interval") is types.pop("overflows_before_backoff") is int
        assert set(types.values()) == {float}


def test_rules_are_frozen_and_equal_when_their_arguments_are_and_only_then():
    for rule in (FixedScale(128), DynamicScale()):
        for field in dataclasses.fields(rule):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(rule, field.name, 1.0)
    assert DynamicScale(8) == DynamicScale(8.0)
    assert hash(DynamicScale(8)) == hash(DynamicScale(8.0))
    different = [FixedScale(8), FixedScale(8, True), DynamicScale(8), DynamicScale(8, max_scale=9)]
    assert len(set(different)) == len(different)
    checks = [rule.checks_gradients for rule in different]
    assert checks == [False, True, True, True]


class Own(ScaleRule):
    def init(self):
        return ScaleState(4.0, 0)

    def update(self, state, finite, *, xp):
        return state

    def get_config(self):
        return {}


def test_a_rule_of_ones_own_inherits_the_defaults():
    rule, state = Own(), ScaleState(4.0, 3)
    assert isinstance(rule, ScaleRule)
    assert not isinstance(state, ScaleRule)
    assert rule.is_dynamic is True
    assert rule.checks_gradients is True
    assert rule.powers_of_two is False
    assert rule.restored(state) == state


def test_a_rule_that_defines_needs_is_refused():
    class Needing(Own):
        needs = ()

    class NeedingSometimes(DynamicScale):
        @property
        def needs(self):
            return None

    for rule in (Needing(), NeedingSometimes()):
        with pytest.raises(ArgumentTypeError, match=r"update\(self, state, finite, .*`needs`"):
            checked_rule(rule)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ((16.0, 3), (16.0, 3)),
        ((math.inf, 3), (32.0, 3)),
        ((math.nan, 3), (32.0, 3)),
        ((0.0, 3), (32.0, 3)),
        ((-8.0, 3), (32.0, 3)),
        ((65.0, 3), (64.0, 3)),
        ((3.0, 3), (4.0, 3)),
        ((16.0, -1), (16.0, 0)),
        ((np.float32(8), np.int64(3)), (8.0, 3)),
    ],
    ids=repr,
)
def test_a_stored_state_is_brought_into_the_range_of_the_rule(stored, expected):
    rule = DynamicScale(initial_scale=32, min_scale=4, max_scale=64)
    state = rule.restored(ScaleState(*stored))
    assert state == expected
    assert isinstance(state, ScaleState)
    assert [type(number) for number in state] == [float, int]


def test_a_fixed_scale_takes_its_number_from_the_code_and_not_from_a_file():
    stored = ScaleState(scale=64.0, good_steps=17)
    assert FixedScale(128).restored(stored) == (128.0, 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FixedScale(128), True),
        (FixedScale(2.0**-126), True),
        (FixedScale(1000), False),
        (DynamicScale(), True),
        (DynamicScale(0.25, 10, 4.0, 0.125, 2.0**-20, 2.0**20), True),
        (DynamicScale(initial_scale=1000), False),
        (DynamicScale(growth_factor=3), False),
        (DynamicScale(backoff_factor=0.3), False),
        (DynamicScale(min_scale=3), False),
        (DynamicScale(max_scale=1e6), False),
    ],
    ids=repr,
)
def test_whether_only_powers_of_two_are_reached_is_known(rule, expected):
    assert rule.powers_of_two is expected

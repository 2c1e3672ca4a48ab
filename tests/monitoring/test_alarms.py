"""When alarms are given and when not, over records that a rule makes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.oracle import trace
from core.strategies import dynamic_scales
from lossscale import DynamicScale, FixedScale
from lossscale.errors import ArgumentError, LossScaleError, TrainingHaltedError
from lossscale.monitoring import Alarm, AlarmKind, Alarms, MonitorSettings, StepRecord
from lossscale.monitoring.alarms import float16_without_scaling

N = 2000


def records(rule, skips, *, loss=0.5, first_step=1, first=None, **settings):
    """The records of a run with these skips, with the scales that the oracle says."""
    scales = [scale for scale, _ in trace(rule, [not skip for skip in skips])]
    before = [rule.initial_scale if first is None else first, *scales]
    for index, skip in enumerate(skips):
        yield StepRecord(
            step=first_step + index,
            scale=before[index],
            skipped=skip,
            next_scale=scales[index],
            loss=loss,
            nonfinite=[("dense/kernel", 3, 0)] if skip else (),
            **settings,
        )


def given_alarms(alarms, run):
    return [(record.step, alarm) for record in run for alarm in alarms.observe(record)]


def kinds(alarms, run):
    return [(step, str(alarm.kind)) for step, alarm in given_alarms(alarms, run)]


def steps(*stretches):
    """("x", 3, "-", 2) -> three skips and two finite steps."""
    pairs = zip(stretches[::2], stretches[1::2], strict=True)
    return [mark == "x" for mark, count in pairs for _ in range(count)]


def test_a_high_first_scale_that_comes_down_gives_no_alarm():
    rule = DynamicScale(initial_scale=2.0**32)
    # amax = 1: 17 halvings until amax * scale fits float16, and the one at the edge later.
    run = steps("x", 15, "-", 3, "x", 1, "-", 20, "x", 1, "-", 5000)
    assert kinds(Alarms(rule), records(rule, run)) == []


@pytest.mark.parametrize("per_execution", [2, 4, 5, 16, 21])
def test_a_start_up_of_which_every_nth_step_is_recorded_gives_no_alarm(per_execution):
    # As a monitor sees it with steps_per_execution, or with samples of every nth step.
    rule = DynamicScale(initial_scale=2.0**32)
    run = steps("x", 15, "-", 3, "x", 1, "-", 20, "x", 1, "-", 500)
    skips = list(itertools.accumulate(run))
    seen = [
        dataclasses.replace(record, steps_skipped=count)
        for record, count in zip(records(rule, run), skips, strict=True)
        if record.step % per_execution == 0
    ]
    assert kinds(Alarms(rule), seen) == []


@pytest.mark.parametrize(
    ("limit", "words"),
    [(1, "The last step was skipped"), (2, "The last 2 steps in a row were skipped")],
)
def test_how_many_steps_in_a_row_is_said_in_words(limit, words):
    rule = DynamicScale()
    found = given_alarms(
        Alarms(rule, MonitorSettings(max_consecutive_skips=limit)), records(rule, steps("x", limit))
    )
    assert found[-1][1].message.startswith(words)


def test_a_healthy_run_of_many_steps_gives_no_alarm():
    rule = DynamicScale(growth_interval=50)
    run = [step % 51 == 50 for step in range(20_000)]
    assert kinds(Alarms(rule), records(rule, run)) == []


def test_three_halvings_within_fifty_steps():
    rule = DynamicScale()
    run = steps("-", 500, "x", 1, "-", 20, "x", 1, "-", 20, "x", 1, "-", 100)
    found = given_alarms(Alarms(rule), records(rule, run))
    assert [(step, alarm.kind) for step, alarm in found] == [(543, AlarmKind.FALLING)]
    message = found[0][1].message
    assert "from 2**15 to 2**12" in message
    assert "dense/kernel (3 inf)" in message
    assert not found[0][1].is_fatal


def test_the_fall_is_measured_in_powers_of_two_whatever_the_factor():
    rule = DynamicScale(backoff_factor=0.25)
    run = steps("-", 500, "x", 2, "-", 10)
    assert kinds(Alarms(rule), records(rule, run)) == [(502, "falling")]
    slow = DynamicScale(backoff_factor=0.75)
    assert kinds(Alarms(slow), records(slow, steps("-", 500, "x", 7))) == []
    assert kinds(Alarms(slow), records(slow, steps("-", 500, "x", 8))) == [(508, "falling")]


def test_a_fall_that_is_seen_one_step_later_without_the_next_scale():
    rule = DynamicScale()
    run = steps("-", 500, "x", 3, "-", 10)
    bare = [StepRecord(record.step, record.scale, record.skipped) for record in records(rule, run)]
    assert kinds(Alarms(rule), bare) == [(504, "falling")]


def test_the_floor():
    rule = DynamicScale(initial_scale=4, growth_interval=N)
    run = steps("x", 2, "-", 1, "x", 3, "-", 300, "x", 1)
    found = given_alarms(Alarms(rule), records(rule, run))
    # Reaching the lowest scale is no alarm; overflowing there is one, once.
    assert [(step, alarm.kind) for step, alarm in found] == [(4, AlarmKind.FLOOR)]
    message = found[0][1].message
    assert "Step 4 was skipped at the lowest loss scale, 1" in message
    assert "dense/kernel (3 inf)" in message
    assert "DynamicScale(min_scale=2.0**-24)" in message


def test_the_floor_again_after_the_scale_has_grown():
    rule = DynamicScale(initial_scale=1, growth_interval=3)
    run = steps("x", 1, "-", 3, "x", 2)
    assert kinds(Alarms(rule), records(rule, run)) == [(1, "floor"), (6, "floor")]


def test_a_fixed_scale_is_at_its_floor():
    rule = FixedScale(128, skip_nonfinite=True)
    run = [StepRecord(step, 128.0, skipped=True) for step in (1, 2, 3)]
    ((step, alarm),) = given_alarms(Alarms(rule), run)
    assert (step, alarm.kind) == (1, AlarmKind.FLOOR)
    assert "the fixed loss scale 2**7" in alarm.message
    assert "DynamicScale" in alarm.message


def test_on_floor():
    rule = DynamicScale(initial_scale=1)
    run = list(records(rule, [True, True]))
    assert kinds(Alarms(rule, MonitorSettings(on_floor="ignore")), run) == []
    found = given_alarms(Alarms(rule, MonitorSettings(on_floor="raise")), run)
    assert [(step, alarm.is_fatal) for step, alarm in found] == [(1, True), (2, True)]


def test_consecutive_skips():
    rule = DynamicScale()
    alarms = Alarms(rule, MonitorSettings(max_consecutive_skips=5))
    assert kinds(alarms, records(rule, steps("x", 4, "-", 1, "x", 4))) == []
    (alarm,) = alarms.observe(
        StepRecord(10, 2.0**6, True, 2.0**5, nonfinite=[("w", 0, 7), ("b", 2, 1)])
    )
    assert alarm.kind is AlarmKind.CONSECUTIVE_SKIPS
    assert alarm.is_fatal
    for part in ("last 5 steps", "step 10", "2**5", "w (7 NaN)", "b (2 inf, 1 NaN)"):
        assert part in alarm.message


def test_many_tensors_are_counted_and_not_all_named():
    rule = DynamicScale(initial_scale=1)
    tensors = [(f"layer_{number}/kernel", 1, 0) for number in range(40)]
    (alarm,) = Alarms(rule).observe(StepRecord(1, 1.0, True, nonfinite=tensors))
    assert "layer_4/kernel (1 inf) and 35 more" in alarm.message
    assert "layer_5" not in alarm.message


def test_a_loss_that_stays_nan_gives_one_alarm():
    rule = FixedScale(8)
    run = [StepRecord(step, 8.0, False, loss=math.inf) for step in range(1, 500)]
    assert kinds(Alarms(rule), run) == [(1, "loss")]
    good = [StepRecord(step, 8.0, False, loss=0.5) for step in range(500, 549)]
    again = [StepRecord(549, 8.0, False, loss=math.nan)]
    assert kinds(Alarms(rule), [*run, *good, *again]) == [(1, "loss")]
    good.append(StepRecord(549, 8.0, False, loss=0.5))
    again = [StepRecord(550, 8.0, False, loss=math.nan)]
    assert kinds(Alarms(rule), [*run, *good, *again]) == [(1, "loss"), (550, "loss")]


def test_the_skip_rate_again_after_it_was_low():
    rule = DynamicScale(initial_scale=2.0**100, growth_interval=N)
    bout = [step % 100 == 99 for step in range(1000)]
    run = [*steps("-", 100), *bout, *steps("-", 20_000), *bout]
    assert kinds(Alarms(rule), records(rule, run)) == [(1100, "skip_rate"), (22_100, "skip_rate")]


@given(st.integers(1, 10**6), st.integers(0, 2**32 - 1))
def test_a_scale_that_stays_in_place_gives_no_rate_alarm(interval, seed):
    """Every skip after a doubling, as soon as may be: the most that a scale can bear."""
    rng = np.random.default_rng(seed)
    alarms = Alarms(DynamicScale(growth_interval=interval))
    step, found = 0, []
    for total in range(1, 61):
        step += interval + int(rng.integers(1, 3))
        found += alarms.observe(StepRecord(step, 2.0**14, True, 2.0**13, steps_skipped=total))
    assert found == []


def test_skips_between_sampled_records_count():
    rule = DynamicScale(growth_interval=N)
    alarms = Alarms(rule, MonitorSettings(max_consecutive_skips=30))
    alarms.observe(StepRecord(1000, 2.0**14, False, steps_skipped=1))
    # 20 skips at unknown steps of 100: enough for the rate, as late as they can have been.
    found = alarms.observe(StepRecord(1100, 2.0**14, False, steps_skipped=21))
    assert [alarm.kind for alarm in found] == [AlarmKind.SKIP_RATE]
    assert "10 of the last 100 steps" in found[0].message
    assert "None of the skipped steps was recorded" in found[0].message
    assert alarms.observe(StepRecord(1120, 2.0**14, True, steps_skipped=41)) == []
    found = alarms.observe(StepRecord(1130, 2.0**14, True, steps_skipped=51))
    assert [alarm.kind for alarm in found] == [AlarmKind.CONSECUTIVE_SKIPS]


def test_a_rule_without_an_interval_has_no_rate():
    alarms = Alarms(FixedScale(8, skip_nonfinite=True), MonitorSettings(on_floor="ignore"))
    run = [StepRecord(step, 8.0, skipped=step % 2 == 0) for step in range(1, 200)]
    assert kinds(alarms, run) == []


def test_a_step_that_comes_twice_changes_nothing():
    rule = DynamicScale(initial_scale=4)
    alarms = Alarms(rule, MonitorSettings(max_consecutive_skips=3))
    for record in records(rule, [True, True]):
        alarms.observe(record)
    with pytest.raises(ValueError, match="later step"):
        alarms.observe(StepRecord(2, 1.0, True))
    assert kinds(alarms, [StepRecord(3, 1.0, True)]) == [(3, "consecutive_skips")]


def test_memory_does_not_grow_with_the_steps():
    rule = DynamicScale(initial_scale=2.0**100, growth_interval=20)
    rng = np.random.default_rng(0)
    run = records(rule, (rng.random(40_000) < 0.03).tolist())
    alarms, sizes = Alarms(rule), []
    for record in run:
        alarms.observe(record)
        if record.step % 500 == 0:
            sizes.append(len(pickle.dumps(alarms)))
    # Numbers of later steps take some bytes more.
    assert max(sizes) <= 1.5 * max(sizes[:4])


def test_float16_without_scaling_says_what_to_do():
    alarm = float16_without_scaling("Model 'sequential'")
    assert (alarm.kind, alarm.is_fatal) == (AlarmKind.NOT_SCALED, False)
    assert "Model 'sequential' computes in float16" in alarm.message
    assert "LossScaleOptimizer(optimizer)" in alarm.message


def test_the_error_of_a_run_that_was_ended():
    with pytest.raises(RuntimeError, match="why") as caught:
        raise TrainingHaltedError("why")
    assert isinstance(caught.value, LossScaleError)


def test_a_fall_that_takes_longer_is_a_place_that_is_found_anew():
    rule = DynamicScale()
    run = steps("-", 500, "x", 1, "-", 120, "x", 1, "-", 120, "x", 1, "-", 120, "x", 1)
    assert kinds(Alarms(rule), records(rule, run)) == []


@pytest.mark.parametrize("interval", [20, 50, 200, 2000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_a_scale_that_hunts_around_its_ceiling_gives_no_alarm(interval, spread):
    """The highest scale that serves is drawn anew on each step, around a mean."""
    rng = np.random.default_rng(interval)
    rule = DynamicScale(initial_scale=2.0**24, growth_interval=interval)
    for start in (8, 20, 28):
        exponent, good, found, alarms = 24, 0, [], Alarms(rule)
        for step in range(1, 3001):
            scale, skipped = 2.0**exponent, exponent > start + spread * rng.standard_normal()
            good = 0 if skipped else good + 1
            exponent += -1 if skipped else good == interval
            good %= interval
            found += alarms.observe(StepRecord(step, scale, skipped, 2.0**exponent, loss=0.5))
        assert [a for a in found if a.kind is AlarmKind.FALLING] == []


@pytest.mark.parametrize("overflows", [1, 2, 3])
def test_one_trouble_gives_one_alarm(overflows):
    """Eight steps whose loss is NaN: it halves, falls, skips often and ends at the floor."""

    class Rule(DynamicScale):
        overflows_before_backoff = overflows

    rule = Rule(initial_scale=8.0)
    run = [StepRecord(step, 8.0, False, 8.0, loss=0.5) for step in range(1, 301)]
    scale = 8.0
    for step in range(301, 325):
        after = max(scale / 2, 1.0) if step % overflows == 0 else scale
        run.append(StepRecord(step, scale, True, after, loss=math.nan, reason="loss"))
        scale = after
    assert kinds(Alarms(rule), run) == [(301, "loss")]
    looked = []
    alarms = Alarms(rule, look=lambda record: looked.append(record.step) or "1 (matmul) gives inf.")
    assert kinds(alarms, run) == [(301, "loss"), (300 + 3 * overflows, "cannot_help")]
    assert looked == [300 + 3 * overflows]


def test_a_worse_trouble_is_said_and_a_lighter_one_is_not():
    rule = DynamicScale(initial_scale=2.0**5)
    run = [*steps("-", 200, "x", 12)]
    # It falls by 2**3, and then skips at the floor.
    assert kinds(Alarms(rule), records(rule, run)) == [(203, "falling"), (206, "floor")]


def test_the_trouble_is_over_after_fifty_steps_without_a_sign():
    rule = DynamicScale(initial_scale=2.0**60)
    twice = steps("-", 200, "x", 4, "-", 180, "x", 4)
    assert kinds(Alarms(rule), records(rule, twice)) == [(203, "falling"), (387, "falling")]


def test_the_rule_is_looked_at_once_in_a_row_of_skips():
    rule, looked = DynamicScale(), []
    alarms = Alarms(rule, look=lambda record: looked.append(record.step) or "")
    run = steps("x", 2, "-", 1, "x", 6, "-", 1, "x", 3)
    assert given_alarms(alarms, records(rule, run)) == []
    assert looked == [6, 13]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (DynamicScale(initial_scale=2.0**12, min_scale=2.0**12), "DynamicScale(min_scale=2.0**-24"),
        (DynamicScale(initial_scale=2.0**-24, min_scale=2.0**-24), "A smaller loss"),
        (FixedScale(2.0**12, skip_nonfinite=True), "DynamicScale, which finds one"),
    ],
)
def test_what_to_do_at_the_floor(rule, words):
    scale = float(rule.init().scale)
    (alarm,) = Alarms(rule).observe(StepRecord(1, scale, True, loss=0.5))
    assert alarm.kind is AlarmKind.FLOOR
    assert words in alarm.message


def test_a_gradient_that_is_wrong_is_said_when_it_gets_worse():
    alarms = Alarms(FixedScale(8))
    errors = (0.05, 0.2, 0.3, 0.6, 0.7, 0.2, 0.04, 0.2, math.inf)
    run = [
        StepRecord(step, 8.0, False, wrong=("a/kernel", error))
        for step, error in enumerate(errors, 1)
    ]
    assert kinds(alarms, run) == [(2, "wrong"), (4, "wrong"), (8, "wrong")]


def test_the_skip_rate():
    rule = DynamicScale(initial_scale=2.0**100, growth_interval=N)
    often = [step % 600 == 599 for step in range(60 * 600)]
    found = given_alarms(Alarms(rule), records(rule, often))
    # The tenth skip at once shows a rate above 3 / 2000.
    step, alarm = found[0]
    assert (step, alarm.kind) == (6000, AlarmKind.SKIP_RATE)
    assert "10 of the last 5401 steps" in alarm.message
    assert "growth_interval=2000" in alarm.message
    assert len(found) == 1
    rare = [step % 800 == 799 for step in range(60 * 800)]
    assert kinds(Alarms(rule), records(rule, rare)) == []


def test_fatal_alarms_say_it_alone():
    alarms = Alarms(DynamicScale(initial_scale=1), MonitorSettings(max_consecutive_skips=1))
    (alarm,) = alarms.observe(StepRecord(1, 1.0, True))
    assert isinstance(alarm, Alarm)
    assert alarm.is_fatal


@given(dynamic_scales(), st.lists(st.booleans(), max_size=300))
def test_alarms_are_few_and_say_something(rule, skips):
    found = given_alarms(Alarms(rule), records(rule, skips))
    assert not any(alarm.is_fatal for _, alarm in found)
    for step, alarm in found:
        assert str(step) in alarm.message
        assert "  " not in alarm.message
        assert alarm.message.endswith(".")
    by_kind = [alarm.kind for _, alarm in found]
    assert by_kind.count(AlarmKind.FALLING) <= 1 + len(skips) // 50
    # Floor alarms need a growth in between.
    scales = [scale for scale, _ in trace(rule, [not skip for skip in skips])]
    grown = sum(after > before for before, after in itertools.pairwise(scales))
    assert by_kind.count(AlarmKind.FLOOR) <= 1 + grown


def test_something_that_is_no_rule():
    with pytest.raises(TypeError, match="scaling rule"):
        Alarms(128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_floor": "stop"}, "`on_floor` must be one of 'warn', 'raise', 'ignore'"),
        ({"on_write_error": "stop"}, "`on_write_error` must be one of 'warn', 'raise'"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips"),
        ({"max_consecutive_skips": True}, "max_consecutive_skips"),
        ({"every": 0}, "`every`"),
        ({"measure_every": 0, "data": 1}, "`measure_every`"),
        ({"measure_every": 2}, "`measure_every` needs `data`"),
        ({"path": "."}, "there is a folder of that name"),
        ({"path": ""}, "must not be empty"),
    ],
)
def test_settings_that_cannot_be_used(settings, message):
    with pytest.raises(ArgumentError, match=message):
        MonitorSettings(**settings)


@pytest.mark.parametrize("settings", [{"path": 3}, {"append": 1}, {"loss_fn": 2}])
def test_settings_of_a_wrong_type(settings):
    with pytest.raises(TypeError, match=next(iter(settings))):
        MonitorSettings(**settings)

"""Records of steps: what is written and read again, and the two alarms."""

from __future__ import annotations

import warnings

import pytest

from lossscale import DynamicScale
from lossscale.errors import ArgumentError, LossScaleWarning, TrainingHaltedError
from lossscale.monitoring import Monitor, MonitorSettings, StepStats, read_records
from lossscale.monitoring.monitor import Skip
from lossscale.monitoring.record import NonfiniteTensor


def skipped(step, scale=8.0, **more):
    return StepStats(step, scale, scale / 2, step, True, loss=0.5, **more)


def applied(step, scale=8.0, **more):
    return StepStats(step, scale, scale, 0, False, **more)


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "run.jsonl"
    monitor = Monitor(MonitorSettings(path), DynamicScale())
    monitor.open()
    tensor = NonfiniteTensor("kernel", 3, 0)
    monitor.observe(skipped(1, last_skip=Skip(1, 8.0, (tensor,))))
    with pytest.warns(LossScaleWarning, match="The loss of step 4 is nan"):
        monitor.observe(applied(4, loss=float("nan"), last_skip=Skip(3, 4.0)))
    monitor.close()
    one, between, last = read_records(path)
    assert (one.step, one.reason, one.nonfinite) == (1, "overflow", (tensor,))
    assert (between.step, between.scale, between.skipped) == (3, 4.0, True)
    assert str(last.loss) == "nan"
    with pytest.raises(ArgumentError, match="append=True"):
        Monitor(MonitorSettings(path), DynamicScale()).open()
    path.write_text(path.read_text() + '{"step": 5')
    assert [record.step for record in read_records(path)] == [1, 3, 4]
    path.write_text("no json\n")
    with pytest.raises(ArgumentError, match="line 1"):
        read_records(path)


def test_the_floor_is_said_once_until_the_scale_grows():
    monitor = Monitor(MonitorSettings(), DynamicScale(initial_scale=1))
    with pytest.warns(LossScaleWarning, match="Step 1 was skipped at the lowest loss scale, 1"):
        monitor.observe(skipped(1, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.observe(skipped(2, 1.0))
        monitor.observe(applied(3, 2.0))
    with pytest.warns(LossScaleWarning):
        monitor.observe(skipped(4, 1.0))
    with pytest.raises(TrainingHaltedError, match="on_floor='raise'"):
        Monitor(MonitorSettings(on_floor="raise"), DynamicScale()).observe(skipped(1, 1.0))


def test_many_skips_in_a_row_end_training():
    monitor = Monitor(MonitorSettings(max_consecutive_skips=2), DynamicScale())
    monitor.observe(skipped(1))
    monitor.observe(applied(2))
    monitor.observe(skipped(3))
    with pytest.raises(TrainingHaltedError, match="The last 2 steps in a row were skipped"):
        monitor.observe(skipped(4))

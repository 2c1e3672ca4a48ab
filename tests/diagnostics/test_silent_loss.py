"""Fidelity in records of training steps: in the file, for TensorBoard, and as an alarm."""

import pytest

from lossscale import DynamicScale
from lossscale.callbacks import LossScaleMonitor
from lossscale.diagnostics import AlarmKind, Alarms, StepRecord, Thresholds
from lossscale.errors import ArgumentError, ArgumentTypeError


def found(lost, *, nonfinite=0, share=1.0):
    return {"lost": lost, "error": lost, "cosine": 1.0, "nonfinite": nonfinite, "share": share}


def alarms_for(shares, **settings):
    alarms = Alarms(DynamicScale(), **settings)
    given = []
    for step, share in enumerate(shares, start=1):
        record = StepRecord(step, 8.0, False, next_scale=8.0, fidelity={"a/w": found(share)})
        given += [(step, alarm.message) for alarm in alarms.observe(record)]
    return given


def test_each_limit_that_is_passed_is_told_once_until_it_is_over():
    # Those at which scaling is recommended, at which no single scale is enough, and required.
    given = alarms_for([0.0, 0.01, 0.02, 0.2, 0.9, 0.02, 0.0, 0.01])
    assert [step for step, _ in given] == [2, 4, 5, 8]
    assert "at a loss scale of 8, 20.0 % of the gradient of a/w is lost to zero" in given[1][1]
    assert alarms_for([0.01], thresholds=Thresholds(lost=0.02)) == []


def test_a_share_at_the_limit_does_not_alarm_again_and_again():
    assert len(alarms_for([0.0011, 0.0009] * 5)) == 1


def test_what_is_negligible_or_not_finite_gives_no_alarm():
    alarms = Alarms(DynamicScale())
    fidelity = {"a/b": found(1.0, share=2.0**-20), "a/w": found(1.0, nonfinite=3)}
    assert alarms.observe(StepRecord(1, 8.0, False, fidelity=fidelity)) == []
    (alarm,) = alarms.observe(StepRecord(2, 8.0, False, fidelity={"a/w": found(0.5)}))
    assert (alarm.kind, alarm.is_fatal) == (AlarmKind.LOST, False)


def test_a_record_is_the_same_after_json():
    record = StepRecord(3, 8.0, False, fidelity={"a/w": found(0.25)})
    assert record.to_json()["fidelity"] == {"a/w": found(0.25)}
    assert StepRecord.from_json(record.to_json()) == record
    assert "fidelity" not in StepRecord(3, 8.0, False).to_json()


@pytest.mark.parametrize("wrong", [1, {"a/w": 1}, {"a/w": {"lost": 1.0}}])
def test_a_record_refuses_what_is_no_fidelity(wrong):
    with pytest.raises(ArgumentError, match="`fidelity` must be"):
        StepRecord(3, 8.0, False, fidelity=wrong)


def test_it_is_written_for_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    from lossscale.diagnostics.tensorboard import TensorBoardWriter

    written = []
    writer = TensorBoardWriter(tmp_path)
    writer._writer.add_scalar = lambda tag, value, step: written.append((tag, value, step))
    writer.append(StepRecord(3, 8.0, False, fidelity={"a/w": found(0.25)}))
    writer.close()
    assert tensorboard
    assert ("fidelity_lost/a/w", 0.25, 3) in written
    assert ("fidelity_error/a/w", 0.25, 3) in written


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fidelity_every": 10}, ArgumentError, "belong together"),
        ({"fidelity_data": (1, 2)}, ArgumentError, "belong together"),
        ({"fidelity_every": 0, "fidelity_data": (1, 2)}, ArgumentError, "`fidelity_every`"),
        ({"fidelity_every": 1, "fidelity_data": "x"}, ArgumentTypeError, r"a batch \(x, y\)"),
        ({"fidelity_every": 1, "fidelity_data": ()}, ArgumentTypeError, r"a batch \(x, y\)"),
    ],
)
def test_a_monitor_checks_its_arguments_first(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScaleMonitor(**arguments)

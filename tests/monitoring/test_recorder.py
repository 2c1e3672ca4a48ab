"""Records of steps: what is written, what `log` is given, and the warnings."""

import json
import math
import warnings

import pytest

from lossscale import DynamicScale
from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning
from lossscale.monitoring import NonfiniteTensor, SkipReason, StepRecord
from lossscale.monitoring.recorder import MonitorSettings, Recorder, SkippedStep, StepStats
from records import column

TENSOR = NonfiniteTensor("kernel", 3, 0)


def skipped(step, scale=8.0, count=None, **more):
    return StepStats(step, scale, scale / 2, count or step, True, **{"loss": 0.5, **more})


def applied(step, scale=8.0, **more):
    return StepStats(step, scale, scale, 0, False, **more)


def opened(path=None, rule=None, **settings):
    recorder = Recorder(MonitorSettings(path, **settings), rule or DynamicScale())
    recorder.open()
    return recorder


# --- The file -------------------------------------------------------------------------------------


def test_a_line_is_strict_json_with_every_key_of_a_record():
    def refuse(name):
        raise AssertionError(name)

    for loss, written in ((math.nan, "nan"), (-math.inf, "-inf"), (0.5, 0.5), (None, None)):
        record = StepRecord(2, 8.0, True, loss=loss, nonfinite=(TENSOR,), reason=SkipReason.LOSS)
        assert json.loads(record.to_json(), parse_constant=refuse) == {
            "step": 2,
            "scale": 8.0,
            "skipped": True,
            "next_scale": None,
            "loss": written,
            "reason": "loss",
            "nonfinite": [{"name": "kernel", "infs": 3, "nans": 0}],
            "steps_skipped": None,
        }


def test_a_record_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = opened(path)
    for step in (1, 2, 3):
        assert recorder.observe(applied(step)) is recorder.last_record
        assert column(path, "step") == list(range(1, step + 1))
        assert path.read_text().endswith("\n")


def test_a_file_that_exists_stays_as_it_is_and_the_error_says_what_to_write(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = opened(path)
    # A second `fit` with the same monitor continues its file.
    recorder.open()
    recorder.observe(applied(1))
    with pytest.raises(ArgumentError, match=r"run\.jsonl', which exists.*time\.time\(\)"):
        opened(path)
    assert column(path, "step") == [1]


def test_a_file_that_becomes_unwritable_is_one_warning_and_training_continues(tmp_path):
    path, logged = tmp_path / "run.jsonl", []
    recorder = opened(path, log=logged.append)
    path.unlink()
    path.mkdir()
    with pytest.warns(LossScaleWarning, match=r"became unwritable.*from step 1 on are lost"):
        recorder.observe(applied(1))
    recorder.observe(applied(2))
    assert [record["step"] for record in logged] == [1, 2]


# --- The arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ArgumentError, "every=0"),
        ({"every": 2.5}, ArgumentError, r"every=2\.5"),
        ({"every": True}, ArgumentError, "every=True"),
        ({"path": 3}, ArgumentTypeError, "path=3 of type int"),
        ({"path": b"run.jsonl"}, ArgumentTypeError, "of type bytes"),
        ({"log": "file"}, ArgumentTypeError, "`log` must be a function"),
        ({"evry": 3}, TypeError, "unexpected keyword argument 'evry'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScaleMonitor(**arguments)


# --- The alarms -----------------------------------------------------------------------------------


def test_the_floor_is_said_once_until_the_scale_grows():
    recorder = opened(rule=DynamicScale(initial_scale=1))
    words = r"Step 1 was skipped at the minimum loss scale, 1\..*explain\(\) of lossscale.torch"
    with pytest.warns(LossScaleWarning, match=words):
        recorder.observe(skipped(1, 1.0))
    with warnings.catch_warnings(action="error"):
        recorder.observe(skipped(2, 1.0))
        recorder.observe(applied(3, 2.0))
    with pytest.warns(LossScaleWarning, match="Not finite: kernel"):
        recorder.observe(skipped(4, 1.0, last_skip=SkippedStep(4, 1.0, (TENSOR,))))


def test_a_scale_of_float32_at_a_floor_that_float32_rounds_is_at_the_floor():
    # 0.1 in float32 is 0.100000001490116.
    recorder = opened(rule=DynamicScale(initial_scale=1, min_scale=0.1))
    with pytest.warns(LossScaleWarning, match="at the minimum loss scale, 0.1"):
        assert recorder.observe(skipped(1, 0.100000001490116)).reason == "floor"


def test_a_loss_that_is_not_finite_is_said_once():
    recorder = opened()
    recorder.observe(applied(1))
    with pytest.warns(LossScaleWarning, match="The loss of step 2 is nan"):
        recorder.observe(applied(2, loss=math.nan))
    recorder.observe(applied(3, loss=math.nan))

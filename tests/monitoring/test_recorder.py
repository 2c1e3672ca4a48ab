"""Records of steps: what is written and read again, what `log` is given, and the alarms."""

import json
import math
import os
import pathlib
import tempfile
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale import DynamicScale
from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning, TrainingHaltedError
from lossscale.monitoring import NonfiniteTensor, SkipReason, StepRecord, read_records
from lossscale.monitoring.recorder import MonitorSettings, Recorder, SkippedStep, StepStats

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

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TENSORS = st.builds(NonfiniteTensor, st.text(max_size=8), st.integers(0, 9), st.integers(0, 2**40))


@st.composite
def runs(draw):
    """Records whose steps ascend, as of a run that never returned to a checkpoint."""
    steps = sorted(draw(st.sets(st.integers(1, 10**9), max_size=6)))
    return [
        StepRecord(
            step,
            draw(FINITE),
            draw(st.booleans()),
            next_scale=draw(st.none() | FINITE),
            loss=draw(st.none() | st.floats(allow_nan=False)),
            reason=draw(st.none() | st.sampled_from(SkipReason)),
            nonfinite=tuple(draw(st.lists(TENSORS, max_size=2))),
            steps_skipped=draw(st.none() | st.integers(0, 10**9)),
        )
        for step in steps
    ]


def lines_of(records):
    return b"".join(record.to_json().encode() + b"\n" for record in records)


@given(runs(), st.data())
def test_any_beginning_of_a_file_reads_to_the_records_of_its_whole_lines(records, data):
    content = lines_of(records)
    cut = content[: data.draw(st.integers(0, len(content)))]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "run.jsonl")
        path.write_bytes(cut)
        whole = records[: cut.count(b"\n")]
        assert read_records(path) == whole
        # A resumed run continues behind the last whole line.
        recorder = opened(path, append=True)
        recorder.observe(applied(10**9 + 1))
        assert read_records(path) == [*whole, recorder.last_record]


@given(runs().filter(bool), st.data())
def test_a_broken_line_is_named(records, data):
    """A line with another value, or with a byte changed, is a record or an error of ours."""
    lines = lines_of(records).splitlines(keepends=True)
    turn = data.draw(st.integers(0, len(lines) - 1))
    if data.draw(st.booleans()):
        fields = json.loads(lines[turn])
        value = st.integers() | FINITE | st.text() | st.none() | st.lists(st.integers() | st.text())
        fields[data.draw(st.sampled_from([*fields, "other"]))] = data.draw(value)
        lines[turn] = json.dumps(fields).encode() + b"\n"
    else:
        line, place = bytearray(lines[turn]), data.draw(st.integers(0, len(lines[turn]) - 2))
        line[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != ord("\n")))
        lines[turn] = bytes(line)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "run.jsonl")
        path.write_bytes(b"".join(lines))
        problem = ""
        try:
            read_records(path)
        except ArgumentError as error:
            problem = str(error)
    assert not problem or f"run.jsonl, line {turn + 1}, is not a record" in problem


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "",
        "[1]",
        '{"scale": 8.0, "skipped": false}',
        '{"step": "1", "scale": 8.0, "skipped": false}',
        '{"step": 1, "scale": 8.0, "skipped": false, "loss": "large"}',
        '{"step": 1, "scale": 8.0, "skipped": true, "reason": "bad luck"}',
        '{"step": 1, "scale": 8.0, "skipped": true, "nonfinite": [["a", 1, 0]]}',
        '{"step": 1, "scale": 8.0, "skipped": false, "color": "red"}',
        "[" * 100_000,
    ],
)
def test_what_is_not_a_record_is_an_error_wherever_it_stands(line, tmp_path):
    path, good = tmp_path / "run.jsonl", StepRecord(1, 8.0, False).to_json()
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ArgumentError, match=r"run\.jsonl, line 2, is not a record of a monitor: "):
        read_records(path)


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
            "explanation": None,
        }


def test_a_record_is_in_the_file_at_once_and_a_repeated_step_replaces_the_first(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = opened(path)
    for number, step in enumerate((1, 2, 3), start=1):
        recorder.observe(applied(step))
        assert len(path.read_text().splitlines()) == number
    # Back to a checkpoint of the first step.
    recorder.observe(applied(2, scale=4.0))
    assert [(record.step, record.scale) for record in read_records(path)] == [(1, 8.0), (2, 4.0)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is full")
def test_a_full_disk_is_one_warning_and_training_continues():
    logged = []
    recorder = opened("/dev/full", append=True, log=logged.append)
    with pytest.warns(LossScaleWarning, match=r"No space.*from step 1 on are lost"):
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
        ({"on_floor": "stop"}, ArgumentError, "on_floor='stop'"),
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
    with pytest.warns(LossScaleWarning, match="Step 1 was skipped at the minimum loss scale, 1"):
        recorder.observe(skipped(1, 1.0))
    with warnings.catch_warnings(action="error"):
        recorder.observe(skipped(2, 1.0))
        recorder.observe(applied(3, 2.0))
    with pytest.warns(LossScaleWarning, match="Not finite: kernel"):
        recorder.observe(skipped(4, 1.0, last_skip=SkippedStep(4, 1.0, (TENSOR,))))


def test_the_floor_ends_training_or_is_ignored(tmp_path):
    path, logged = tmp_path / "run.jsonl", []
    with pytest.raises(TrainingHaltedError, match="on_floor='raise'"):
        opened(path, on_floor="raise", log=logged.append).observe(skipped(1, 1.0))
    assert [record.reason for record in read_records(path)] == ["floor"]
    assert [record["reason"] for record in logged] == ["floor"]
    with warnings.catch_warnings(action="error"):
        opened(on_floor="ignore").observe(skipped(1, 1.0))


def test_a_scale_of_float32_at_a_floor_that_float32_rounds_is_at_the_floor():
    # 0.1 in float32 is 0.100000001490116.
    recorder = opened(rule=DynamicScale(initial_scale=1, min_scale=0.1), on_floor="ignore")
    recorder.observe(skipped(1, 0.100000001490116))
    assert recorder.last_record.reason == "floor"


def test_a_loss_that_is_not_finite_is_said_once():
    recorder = opened()
    recorder.observe(applied(1))
    with pytest.warns(LossScaleWarning, match="The loss of step 2 is nan"):
        recorder.observe(applied(2, loss=math.nan))
    recorder.observe(applied(3, loss=math.nan))

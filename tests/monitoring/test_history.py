"""The file of a run: what is written is read again, and what is broken is named by its line."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.strategies import dynamic_scales
from lossscale import DynamicScale, FixedScale
from lossscale.monitoring import (
    HistoryHeader,
    HistoryWriter,
    NonfiniteTensor,
    SkipReason,
    StepRecord,
    TrainingHistory,
)
from lossscale.monitoring.skips import SkipCounter, lowest_scale, skip_reason
from lossscale.rules import ScaleRule, ScaleState, Seen

RULE = DynamicScale(initial_scale=8, growth_interval=3)
HEADER = HistoryHeader.of(RULE, {"keras": "3.15.1"})

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
scales = st.floats(2.0**-126, 2.0**126)
tensors = st.builds(NonfiniteTensor, names, st.integers(0, 2**40), st.integers(0, 2**40))


@st.composite
def records(draw, step):
    skipped = draw(st.booleans())
    return StepRecord(
        step=step,
        scale=draw(scales),
        skipped=skipped,
        next_scale=draw(st.none() | scales),
        loss=draw(st.none() | st.floats()),
        reason=draw(st.none() | st.sampled_from(SkipReason)) if skipped else None,
        nonfinite=draw(st.lists(tensors, max_size=2)),
        steps_skipped=draw(st.none() | st.integers(int(skipped), 2**31)),
        wrong=draw(st.none() | st.tuples(names, st.floats(allow_nan=False))),
        alarms=draw(st.lists(st.tuples(names, names), max_size=2)),
    )


@st.composite
def histories(draw):
    steps = sorted(draw(st.sets(st.integers(1, 2**31), max_size=5)))
    header = HistoryHeader.of(draw(dynamic_scales()), {"keras": draw(st.text())})
    return TrainingHistory(header, [draw(records(step)) for step in steps])


def known(record):
    """The fields of a record, comparable: NaN is equal to itself here."""
    return repr(record)


@given(histories())
def test_what_is_written_is_read_again(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("history") / "run.jsonl"
    history.write(path)
    again = TrainingHistory.read(path)
    assert again.header == history.header
    assert again.header.scale_rule() == history.header.scale_rule()
    assert [known(record) for record in again.records] == [known(r) for r in history.records]
    assert not again.truncated


@given(histories())
def test_every_line_is_strict_json_and_ascii(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("history") / "run.jsonl"
    history.write(path)

    def refuse(constant):
        pytest.fail(f"{constant} is no JSON")

    lines = path.read_bytes().decode("ascii").split("\n")
    assert lines.pop() == ""
    for line in lines:
        assert isinstance(json.loads(line, parse_constant=refuse), dict)
    assert len(lines) == 1 + len(history.records)


def written(tmp_path, *lines, end="\n"):
    path = tmp_path / "run.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + end)
    return path


FIRST = HEADER.to_json()
GOOD = {"step": 1, "scale": 8.0, "skipped": False}


def test_a_file_written_by_hand(tmp_path):
    path = written(
        tmp_path,
        FIRST,
        {"step": 1, "scale": 8, "skipped": True, "next_scale": 4, "loss": "-inf"},
        {"step": 2, "scale": 4, "skipped": False, "loss": 0.5, "next_scale": None},
    )
    first, second = TrainingHistory.read(path).records
    assert (first.loss, first.next_scale) == (-math.inf, 4.0)
    assert first.reason is SkipReason.UNKNOWN
    assert (second.loss, second.next_scale, second.reason) == (0.5, None, None)


@given(cut=st.integers(1, 10**6))
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("history") / "run.jsonl"
    whole = TrainingHistory(HEADER, [StepRecord(step, 8.0, False, loss=0.5) for step in (1, 2, 3)])
    whole.write(path)
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    size = header + cut % (len(content) - header + 1)
    path.write_bytes(content[:size])
    *complete, rest = content[:size].split(b"\n")
    # A record that lacks nothing but its line end is complete.
    records = len(complete) - 1 + rest.endswith(b"}")
    again = TrainingHistory.read(path)
    assert again.steps == [1, 2, 3][:records]
    assert again.truncated == bool(rest and not rest.endswith(b"}"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "the file is empty"),
        (["", FIRST], "the file is empty"),
        (["loss,scale"], "no history of a training run"),
        (["3"], 'line 1: a history starts with a JSON object that has "lossscale_history"'),
        ([GOOD], "line 1: a history starts with"),
        ([{**FIRST, "lossscale_history": 2}], "line 1: this is a history of format 2"),
        ([{**FIRST, "started": None}], "line 1: the first line must have"),
        ([{**FIRST, "rule": "DynamicScale"}], "line 1: the first line must have"),
        (
            [{**FIRST, "rule": {"class_name": "DynamicScale", "config": {"initial_scale": 0}}}],
            "line 1: the rule of the first line cannot be made: `initial_scale` must be",
        ),
        (
            [{**FIRST, "rule": {"class_name": "DynamicScale", "config": {"patience": 2}}}],
            "line 1: the rule of the first line cannot be made: .*patience",
        ),
        ([FIRST, "", GOOD], "line 2"),
        ([FIRST, GOOD, '{"step": 2, "scale'], "line 3"),
        ([FIRST, GOOD, "[" * 100_000], "line 3: the brackets are nested too deep"),
        ([FIRST, {**GOOD, "loss": math.nan}], "line 2: NaN is no JSON"),
        ([FIRST, {**GOOD, "loss": "high"}], "line 2: `loss` must be a number, 'inf'"),
        ([FIRST, {**GOOD, "scale": 0}], "line 2: `scale` must be a finite number above 0"),
        ([FIRST, '{"step": 1, "scale": 1e999, "skipped": false}'], "line 2: `scale` must be"),
        ([FIRST, {**GOOD, "step": 0}], "line 2: `step` must be an integer of at least 1"),
        ([FIRST, {**GOOD, "step": 1.5}], "line 2: `step` must be an integer"),
        ([FIRST, {**GOOD, "skipped": 1}], "line 2: `skipped` must be True or False"),
        ([FIRST, {**GOOD, "reason": "loss"}], "line 2: `reason` is for a step that was skipped"),
        ([FIRST, {**GOOD, "skipped": True, "reason": "bad"}], "line 2: `reason` must be one of"),
        ([FIRST, {**GOOD, "nonfinite": [["w", 1, 2]]}], "line 2: `nonfinite` must be a list of"),
        ([FIRST, {**GOOD, "nonfinite": [{"name": "w"}]}], "line 2: `nonfinite` must be a list of"),
        (
            [FIRST, {**GOOD, "nonfinite": [{"name": "w", "infs": -1, "nans": 0}]}],
            "line 2: `infs` must be an integer of at least 0",
        ),
        ([FIRST, {"step": 1}], r"line 2: a step must have `step`, `scale` and `skipped`"),
        ([FIRST, {**GOOD, "skip": 1}], r"line 2: a step must have .*Received the keys.*'skip'"),
        ([FIRST, "[]"], "line 2: a step must be a JSON object"),
        ([FIRST, GOOD, GOOD], "line 3: A record must be of a later step .* step 1"),
    ],
)
def test_a_broken_file_names_its_line(tmp_path, lines, message):
    path = written(tmp_path, *lines)
    with pytest.raises(ValueError, match=message) as caught:
        TrainingHistory.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"\0" * 100, b'{"lossscale_hist'])
def test_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is empty|no history"):
        TrainingHistory.read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        TrainingHistory.read(tmp_path / "none.jsonl")


def test_a_process_that_is_killed_leaves_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "run.jsonl"
    program = f"""
import os, signal
from lossscale import DynamicScale
from lossscale.monitoring import HistoryHeader, HistoryWriter, StepRecord
writer = HistoryWriter({str(path)!r}, HistoryHeader.of(DynamicScale()))
for step in range(1, 6):
    writer.append(StepRecord(step, 8.0, skipped=False))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert TrainingHistory.read(path).steps == [1, 2, 3, 4, 5]


def test_a_file_that_exists_is_left_alone(tmp_path):
    path = written(tmp_path, FIRST, GOOD)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"exists.*append=True"):
        HistoryWriter(path, HEADER)
    with pytest.raises(ValueError, match="exists"):
        TrainingHistory(HEADER).write(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["loss,scale\n", '{"step": 1}\n', '{"lossscale_histo'])
def test_nothing_is_appended_to_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"run\.jsonl"):
        HistoryWriter(path, HEADER, append=True)
    assert path.read_text() == content


@pytest.mark.parametrize(
    "rest", ["", '{"step": 9, "sca', '{"step": 9, "scale": 4, "skipped": false}']
)
def test_a_resumed_run_goes_on_in_the_same_file(tmp_path, rest):
    steps = [{**GOOD, "step": step, "scale": 8} for step in (1, 2, 3, 4)]
    path = written(tmp_path, FIRST, *steps, end="\n" + rest)
    new = HistoryHeader.of(FixedScale(2.0))
    # The checkpoint was of step 2: steps 3 and 4 are taken again.
    with HistoryWriter(path, new, append=True) as writer:
        writer.append(StepRecord(3, 2.0, skipped=False))
        writer.append(StepRecord(4, 2.0, skipped=True))
    history = TrainingHistory.read(path)
    assert history.steps == [1, 2, 3, 4]
    assert history.scales == [8, 8, 2, 2]
    assert history.header.scale_rule() == FixedScale(2.0)
    assert not history.truncated


def test_a_run_that_is_resumed_at_its_last_step_loses_none(tmp_path):
    path = written(tmp_path, FIRST, GOOD, end="")
    with HistoryWriter(path, HEADER, append=True) as writer:
        writer.append(StepRecord(2, 8.0, skipped=False))
    assert TrainingHistory.read(path).steps == [1, 2]


@pytest.mark.parametrize("content", [None, ""])
def test_appending_to_nothing_makes_a_new_file(tmp_path, content):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    HistoryWriter(path, HEADER, append=True).close()
    assert TrainingHistory.read(path).header == HEADER


def test_a_bad_record_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "run.jsonl"
    with HistoryWriter(path, HEADER) as writer:
        writer.append(StepRecord(2, 8.0, skipped=False))
        before = path.read_bytes()
        with pytest.raises(ValueError, match="later step"):
            writer.append(StepRecord(2, 8.0, skipped=False))
        assert path.read_bytes() == before
        writer.append(StepRecord(3, 8.0, skipped=False))
    assert TrainingHistory.read(path).steps == [2, 3]


def test_a_header_that_is_no_json_makes_no_file(tmp_path):
    class OddScale(ScaleRule):
        def get_config(self):
            return {"f": len}

    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="strict JSON"):
        HistoryWriter(path, HistoryHeader.of(OddScale()))
    assert not path.exists()


def test_numpy_scalars_become_python_numbers():
    record = StepRecord(
        np.int64(3), np.float32(8), np.bool_(True), np.float32(4), np.float16(0.5),
        nonfinite=[("w", np.int32(1), np.int64(0))],
    )  # fmt: skip
    assert json.loads(json.dumps(record.to_json()))["nonfinite"] == [
        {"name": "w", "infs": 1, "nans": 0}
    ]
    assert [type(value) for value in (record.step, record.scale, record.skipped)] == [
        int, float, bool,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": True}, "step"),
        ({"step": "1"}, "step"),
        ({"scale": math.nan}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": "8"}, "scale"),
        ({"skipped": None}, "skipped"),
        ({"next_scale": 0.0}, "next_scale"),
        ({"loss": "nan"}, "loss"),
        ({"steps_skipped": -1}, "steps_skipped"),
        ({"skipped": True, "steps_skipped": 0}, "steps_skipped"),
        ({"nonfinite": ["w"]}, "nonfinite"),
        ({"nonfinite": [("", 1, 0)]}, "nonfinite"),
        ({"nonfinite": [("w", 1)]}, "nonfinite"),
        ({"nonfinite": 3}, "nonfinite"),
    ],
)
def test_a_record_refuses_what_it_cannot_mean(settings, message):
    with pytest.raises(ValueError, match=f"`{message}`"):
        StepRecord(**{"step": 1, "scale": 8.0, "skipped": False, **settings})


def test_what_a_history_says():
    skips = [True, True, False, False, True, False, True, True, True]
    history = TrainingHistory(
        HEADER,
        [
            StepRecord(
                step, 1.0 if step > 6 else 8.0, skip, reason="overflow" if skip else None,
                nonfinite=[("w", 1, 0), *([("b", 0, 2)] if step > 4 else [])] if skip else [],
            )
            for step, skip in enumerate(skips, start=1)
        ],
    )  # fmt: skip
    assert history.skipped_steps == [1, 2, 5, 7, 8, 9]
    assert history.skip_rate == pytest.approx(6 / 9)
    assert (history.skips.longest, history.skips.consecutive) == (3, 3)
    assert history.steps_at_floor == [7, 8, 9]
    assert history.overflow_counts == {"w": 6, "b": 4}
    assert history.losses == [None] * 9
    summary = history.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["reasons"] == {"overflow": 6}
    assert (summary["lowest_scale"], summary["highest_scale"]) == (1.0, 8.0)
    assert summary["skips"] == 6


def test_an_empty_history():
    history = TrainingHistory(HEADER)
    assert (history.skip_rate, history.scales, history.overflow_counts) == (0.0, [], {})
    with pytest.raises(ValueError, match="no summary"):
        history.summary()


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 7),
)
def test_sampled_records_count_every_skip(skips, every):
    total, sampled = 0, []
    for step, skip in enumerate(skips, start=1):
        total += skip
        if step % every == 0:
            sampled.append(StepRecord(step, 8.0, skip, steps_skipped=total))
    history = TrainingHistory(HEADER, sampled)
    if not sampled:
        assert history.skips.steps == 0
        return
    first = sampled[0].step
    covered = skips[first - 1 : sampled[-1].step]
    assert (history.skips.steps, history.skips.skips) == (len(covered), sum(covered))
    # A run of skips is never taken for longer than it was.
    runs = "".join("x" if skip else " " for skip in covered).split()
    assert history.skips.longest <= max(map(len, runs), default=0)
    if every == 1:
        assert history.skips.longest == max(map(len, runs), default=0)


def test_a_counter_that_was_set_from_outside_counts_no_step_twice():
    counter = SkipCounter()
    counter.observe(StepRecord(1, 8.0, False, steps_skipped=5))
    assert counter.observe(StepRecord(4, 8.0, False, steps_skipped=900)).skips == 2
    assert counter.observe(StepRecord(8, 8.0, False, steps_skipped=0)).skips == 0


@pytest.mark.parametrize("rule", [DynamicScale(min_scale=0.1), DynamicScale(min_scale=2.0**-126)])
def test_the_lowest_scale_is_that_of_float32(rule):
    state = [np.float32(rule.initial_scale), np.int64(0)]
    for _ in range(200):
        state = rule.update(ScaleState(*state), Seen(np.False_), xp=np)
    lowest = float(np.float32(state.scale))
    assert skip_reason(rule, lowest, 0.5) is SkipReason.FLOOR
    assert skip_reason(rule, lowest * 2, 0.5) is SkipReason.OVERFLOW
    assert lowest_scale(rule) == pytest.approx(lowest, rel=1e-6)


class Halving(ScaleRule):
    """A rule of the user's own: backs off by halves down to a lowest scale."""

    def __init__(self, lowest):
        self.lowest = lowest

    def init(self):
        return ScaleState(2.0**10, 0)

    def update(self, state, seen, *, xp):
        lowered = xp.where(state.scale > self.lowest, state.scale * 0.5, state.scale)
        return ScaleState(xp.where(seen.finite, state.scale, lowered), state.good_steps)


@pytest.mark.parametrize("lowest", [0.25, 64.0])
def test_the_lowest_scale_of_a_rule_of_ones_own_is_found(lowest):
    assert lowest_scale(Halving(lowest)) == lowest


def test_a_rule_that_never_stops_has_no_lowest_scale():
    class Slow(Halving):
        def update(self, state, seen, *, xp):
            return ScaleState(xp.where(seen.finite, state.scale, state.scale * 0.999), 0)

    assert lowest_scale(Slow(0)) is None
    assert skip_reason(Slow(0), 1e-30, 0.5) is SkipReason.OVERFLOW


@pytest.mark.parametrize(
    ("scale", "loss", "reason"),
    [
        (8.0, 0.5, "overflow"),
        (8.0, math.nan, "loss"),
        (8.0, math.inf, "loss"),
        (8.0, None, "unknown"),
        (1.0, 0.5, "floor"),
        (1.0, None, "floor"),
        (1.0, math.nan, "loss"),
    ],
)
def test_the_reason_of_a_skip(scale, loss, reason):
    assert skip_reason(RULE, scale, loss) == reason


def test_a_rule_of_ones_own_is_described_and_not_made():
    class Patient(ScaleRule):
        def get_config(self):
            return {"patience": 2}

    header = HistoryHeader.from_json(HistoryHeader.of(Patient()).to_json())
    assert header.rule == {"class_name": "Patient", "config": {"patience": 2}}
    assert header.scale_rule() is None
    assert TrainingHistory(header, [StepRecord(1, 1.0, True)]).steps_at_floor is None


def test_a_history_of_the_version_before_can_be_read(tmp_path):
    measured = {"lost": 0.1, "error": 0.2, "cosine": 0.9, "nonfinite": 0.0, "share": 1.0}
    fidelity = {"a/kernel": measured, "b/kernel": {**measured, "error": 0.4}}
    line = {**GOOD, "histograms": {"a/kernel": {"zeros": 3}}, "fidelity": fidelity}
    (record,) = TrainingHistory.read(written(tmp_path, FIRST, line)).records
    assert record.wrong == ("b/kernel", 0.4)


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    with HistoryWriter(path, HEADER) as writer:
        writer.append(StepRecord(1, 8.0, skipped=False))
        before = path.read_bytes()
        with pytest.raises(ValueError, match="is written by another run now"):
            HistoryWriter(path, HEADER, append=True)
        assert path.read_bytes() == before
    HistoryWriter(path, HEADER, append=True).close()


@pytest.mark.parametrize(
    "line",
    [
        {**GOOD, "step": 10**309},
        {**GOOD, "nonfinite": [{"name": "\ud800", "infs": 1, "nans": 0}]},
        {**GOOD, "wrong": ["\udfff", 0.5]},
        {**GOOD, "wrong": []},
        {**GOOD, "alarms": [["loss"]]},
        {**GOOD, "fidelity": {"a": 1}},
    ],
)
def test_hostile_lines_are_named(tmp_path, line):
    with pytest.raises(ValueError, match="line 2: "):
        TrainingHistory.read(written(tmp_path, FIRST, line))


def test_it_is_shown_in_one_line():
    history = TrainingHistory(HEADER)
    assert repr(history) == "<TrainingHistory: no steps>"
    history.append(StepRecord(1, 8.0, skipped=True, next_scale=4.0, steps_skipped=1))
    history.append(StepRecord(900, 4.0, skipped=False, next_scale=4.0, steps_skipped=1))
    said = "steps 1 to 900, 1 skipped, loss scale 8 at first and 4 at last"
    assert repr(history) == f"<TrainingHistory: {said}>"

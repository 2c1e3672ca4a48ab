"""`lossscale plot`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import sys

import matplotlib.image
import pytest

from lossscale import DynamicScale
from lossscale.cli.main import main
from lossscale.monitoring import HistoryHeader, StepRecord, TrainingHistory

RECORDS = [
    StepRecord(1, 32.0, True, 16.0, 0.5, nonfinite=[("dense/kernel", 3, 0), ("b", 0, 1)]),
    StepRecord(2, 16.0, True, 8.0, 0.5, nonfinite=[("dense/kernel", 1, 0)]),
    StepRecord(3, 8.0, False, 8.0, 0.25),
    StepRecord(4, 8.0, False, 8.0, 0.125),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TrainingHistory(HistoryHeader.of(DynamicScale()), RECORDS).write("run.jsonl")
    return tmp_path


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg", ".PNG"])
def test_a_picture_and_a_summary(folder, suffix, capsys):
    assert main(["plot", "run.jsonl", "-o", f"run{suffix}"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "Steps:      1 to 4, 4 of them recorded",
        "Skipped:    2 (50.00%), at most 2 in a row",
        "Loss scale: 2**5 at first, 8 at last, between 8 and 2**5",
        "Not finite: dense/kernel in 2 recorded steps",
        "Not finite: b in 1 recorded step",
        f"Picture:    run{suffix}",
    ]
    assert err == ""
    assert (folder / f"run{suffix}").stat().st_size > 5000


def test_the_picture_has_two_panels_if_there_is_a_loss(folder, capsys):
    assert main(["plot", "run.jsonl", "--output", "both.png"]) == 0
    bare = [StepRecord(record.step, record.scale, record.skipped) for record in RECORDS]
    TrainingHistory(HistoryHeader.of(DynamicScale()), bare).write("bare.jsonl")
    assert main(["plot", "bare.jsonl", "--output", "one.png"]) == 0
    both, one = (matplotlib.image.imread(folder / name) for name in ("both.png", "one.png"))
    assert (both.shape[0], one.shape[0]) == (900, 600)
    for picture in (both, one):
        assert picture.std() > 0.05


def test_json(folder, capsys):
    assert main(["plot", "run.jsonl", "-o", "run.png", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["skips"], found["skip_rate"], found["picture"]) == (2, 0.5, "run.png")
    assert found["overflow_counts"] == {"dense/kernel": 2, "b": 1}
    assert found["truncated"] is False


def test_a_run_that_was_killed(folder, capsys):
    path = folder / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert main(["plot", "run.jsonl", "-o", "run.png"]) == 0
    out = capsys.readouterr().out
    assert "1 to 3, 3 of them recorded" in out
    assert "The file ends within a line" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: b"", ": the file is empty"),
        (lambda lines: b"loss,scale\n1,2\n", ": this is no history of a training run"),
        (lambda lines: b"\x89PNG\r\n\x1a\n\0\0", ": this is no history of a training run"),
        (lambda lines: b'{"a": 1}\n', ", line 1: a history starts with"),
        (lambda lines: b"".join([*lines[:2], lines[2][:20] + b"\n", *lines[3:]]), ", line 3: "),
        (lambda lines: lines[0], ": the history has no steps yet"),
    ],
    ids=["empty", "table", "picture", "json", "broken_line", "no_steps"],
)
def test_a_file_that_is_no_history(folder, change, message, refused):
    path = folder / "run.jsonl"
    path.write_bytes(change(path.read_bytes().splitlines(keepends=True)))
    assert f"run.jsonl{message}" in refused("plot", "run.jsonl", "-o", "run.png")
    assert not (folder / "run.png").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: HISTORY"),
        (["run.jsonl"], "-o/--output"),
        (["none.jsonl", "-o", "run.png"], "none.jsonl: No such file or directory"),
        ([".", "-o", "run.png"], ".: Is a directory"),
        (["run.jsonl", "-o", "run.txt"], "must end in .png, .pdf, .svg. Received: 'run.txt'"),
        (["run.jsonl", "-o", "nowhere/run.png"], "a folder that does not exist: 'nowhere'"),
        (["run.jsonl", "--html", "run.jsonl"], "--html must end in .html. Received: 'run.jsonl'"),
    ],
)
def test_what_cannot_be_used(folder, arguments, message, refused):
    before = (folder / "run.jsonl").read_bytes()
    assert message in refused("plot", *arguments)
    assert (folder / "run.jsonl").read_bytes() == before


def test_no_window_is_needed(folder, capsys):
    # pyplot would look for a display.
    sys.modules.pop("matplotlib.pyplot", None)
    assert main(["plot", "run.jsonl", "-o", "run.png"]) == 0
    assert "matplotlib.pyplot" not in sys.modules


def test_a_page_that_opens_offline(folder, capsys):
    header = HistoryHeader.of(DynamicScale(), {"note": "<b>"})
    alarm = ("falling", "<script>alert(1)</script> & more")
    records = [
        StepRecord(
            step,
            2.0 ** (10 + step % 5),
            step % 7 == 0,
            loss=None if step % 11 == 0 else math.nan if step % 13 == 0 else 1 / step,
            nonfinite=[("layer/" * 30, 3, 0)] if step % 7 == 0 else (),
            alarms=[alarm] if step % 50 == 0 else (),
        )
        for step in range(1, 20_001)
    ]
    TrainingHistory(header, records).write("long.jsonl")
    assert main(["plot", "long.jsonl", "--html", "run.html"]) == 0
    assert "Page:       run.html" in capsys.readouterr().out
    page = (folder / "run.html").read_text()
    assert len(page.encode()) < 60_000
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    for words in ("20000 recorded", "loss not finite (1", "alarm (400)", "the loss is not known"):
        assert words in page
    assert "&lt;script&gt;" in page


def test_a_mean_of_an_epoch_is_no_loss_of_a_step(folder):
    TrainingHistory(HistoryHeader.of(DynamicScale(), {"keras": "3.15"}), RECORDS).write("k.jsonl")
    for name, words in (("run", "loss of the step"), ("k", "mean of the losses of the epoch")):
        assert main(["plot", f"{name}.jsonl", "--html", "run.html"]) == 0
        assert words in (folder / "run.html").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 1.7e308},
        {"step": 10**309},
        {"nonfinite": [{"name": "\ud800", "infs": 1, "nans": 0}]},
    ],
    ids=["loss", "step", "surrogate"],
)
@pytest.mark.parametrize("way", [["-o", "run.png"], ["--html", "run.html"]], ids=["png", "html"])
def test_hostile_files(folder, change, way, refused):
    line = {"step": 5, "scale": 8.0, "skipped": True, **change}
    with (folder / "run.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert "run.jsonl" in refused("plot", "run.jsonl", *way)

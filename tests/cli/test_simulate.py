"""`lossscale simulate`: its numbers against the law, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from core.oracle import trace
from lossscale import DynamicScale, FixedScale
from lossscale.cli.arguments import rule_from_words
from lossscale.cli.files import UsageError
from lossscale.cli.main import main
from lossscale.monitoring import HistoryHeader, StepRecord, TrainingHistory


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulated(arguments, capsys):
    assert main(["simulate", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize(("chance", "published"), [("1e-3", -0.84), ("1e-4", 0.35)])
def test_the_drift_law(chance, published, capsys):
    found = simulated(
        ["--overflow-probability", chance, "--steps", "20000", "--runs", "100"], capsys
    )
    assert 1000 * found["expected_drift"] == pytest.approx(published, abs=0.005)
    error = found["drift_error"]
    assert abs(found["drift"] - found["expected_drift"]) < 5 * error
    assert 1000 * error < 0.05
    assert found["critical_probability"] == pytest.approx(3.466e-4, rel=1e-3)
    assert (found["runs"], found["steps"], found["probability"]) == (100, 20000, float(chance))
    assert found["rule"]["config"] == DynamicScale().get_config()


def test_the_table(capsys):
    arguments = ["--overflow-probability", "0.01", "--rule", "DynamicScale", "growth_interval=500"]
    assert main(["simulate", *arguments, "--steps", "4000", "--runs", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("DynamicScale(initial_scale=2**15, growth_interval=500, ")
    assert lines[1] == (
        "Each step overflows with probability 0.01, whatever the scale; 8 runs of 4000 steps, "
        "seed 0"
    )
    assert "│ 1.000% │" in out
    assert "-9.934" in out
    text = " ".join(out.split())
    assert "falls if more than 0.00139 of the steps overflow" in text
    assert "At 0.01 it falls to its lowest value." in text


def test_a_scale_that_stays_up(capsys):
    assert main(["simulate", "--overflow-probability", "1e-5", "--steps", "1000"]) == 0
    assert "At 1e-05 it stays up." in " ".join(capsys.readouterr().out.split())


def test_a_trace_of_gradients(folder, capsys):
    (folder / "amax.txt").write_text("# largest gradients\n8\n\n8.0  # again\n8e0\ninf\n0\nnan\n")
    found = simulated(["--trace", "amax.txt"], capsys)
    # 8 * 2**15 and 8 * 2**14 and 8 * 2**13 overflow float16; so do inf and nan.
    assert found["steps"] == 6
    assert found["skip_rate"] == pytest.approx(5 / 6)
    assert found["final_scale"]["median"] == 2.0**10
    assert found["expected_drift"] is None


def test_a_trace_of_a_fixed_scale(folder, capsys):
    (folder / "amax.txt").write_text("1\n1000\n1\n1\n")
    found = simulated(["--trace", "amax.txt", "--rule", "FixedScale", "scale=128"], capsys)
    assert (found["skip_rate"], found["overflow_rate"]) == (0.0, 0.25)
    assert main(["simulate", "--trace", "amax.txt", "--rule", "FixedScale", "scale=128"]) == 0
    assert "applied with an overflow │ 25.000%" in " ".join(
        capsys.readouterr().out.replace("┃", "│").split()
    )


def test_the_history_of_a_run_is_replayed(folder, capsys):
    skips = [True, False, False, True, False, False, False]
    history = TrainingHistory(
        HistoryHeader.of(DynamicScale()),
        [StepRecord(step, 8.0, skip) for step, skip in enumerate(skips, start=101)],
    )
    history.write("run.jsonl")
    rule = "DynamicScale", "initial_scale=64", "growth_interval=2"
    found = simulated(["--trace", "run.jsonl", "--rule", *rule], capsys)
    (*_, (expected, _)) = trace(rule_from_words(rule), [not skip for skip in skips])
    assert found["final_scale"]["median"] == expected
    assert found["skip_rate"] == pytest.approx(2 / 7)


def test_a_sampled_history_is_not_replayed(capsys):
    history = TrainingHistory(
        HistoryHeader.of(DynamicScale()), [StepRecord(step, 8.0, False) for step in (10, 20)]
    )
    history.write("run.jsonl")
    assert "only 2 of the steps 10 to 20 are recorded" in refused(["--trace", "run.jsonl"], capsys)


def test_a_picture(folder, capsys):
    arguments = ["--overflow-probability", "0.05", "--steps", "300"]
    assert main(["simulate", *arguments, "--plot", "runs.png"]) == 0
    assert "Picture: runs.png" in capsys.readouterr().out
    found = simulated([*arguments, "--runs", "1", "--plot", "one.svg"], capsys)
    assert found["picture"] == "one.svg"
    assert (folder / "runs.png").stat().st_size > 5000
    assert (folder / "one.svg").stat().st_size > 5000


def test_a_seed(capsys):
    base = ["--overflow-probability", "0.3", "--steps", "200", "--runs", "3"]
    first, again = (simulated(base, capsys) for _ in range(2))
    other = simulated([*base, "--seed", "5"], capsys)
    assert first == again
    assert first["skip_rate"] != other["skip_rate"]


def refused(arguments, capsys):
    assert main(["simulate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lossscale: ")
    assert err.count("\n") == 1
    return err


P = ["--overflow-probability", "0.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --overflow-probability --trace is required"),
        ([*P, "--trace", "amax.txt"], "not allowed with argument --overflow-probability"),
        (["--overflow-probability", "1.5"], "must be a number from 0 to 1, not '1.5'"),
        (["--overflow-probability", "nan"], "must be a number from 0 to 1, not 'nan'"),
        (["--overflow-probability", "often"], "must be a number from 0 to 1, not 'often'"),
        ([*P, "--steps", "0"], "--steps: must be an integer from 1 to 100000000, not '0'"),
        ([*P, "--runs", "-2"], "--runs"),
        ([*P, "--seed", "x"], "--seed: must be an integer"),
        ([*P, "--steps", "100000000", "--runs", "2"], "steps * runs must be at most 100000000"),
        (
            [*P, "--rule", "dynamic:growth_interval=5,min_scale=2"],
            "is written --rule DynamicScale growth_interval=5 min_scale=2",
        ),
        ([*P, "--rule", "fixed"], "is written --rule FixedScale"),
        (["--trace", "amax.txt", "--runs", "3"], "--runs has a meaning only with --overflow-"),
        (["--trace", "none.txt"], "none.txt: No such file or directory"),
        (["--trace", "."], ".: Is a directory"),
        ([*P, "--plot", "runs.txt"], "--plot must end in .png, .pdf, .svg"),
        ([*P, "--plot", "nowhere/runs.png"], "--plot is in a folder that does not exist"),
        (
            [*P, "--rule", "adaptive"],
            "there is no rule 'adaptive'; known are FixedScale, DynamicScale",
        ),
        ([*P, "--rule", "DynamicScale", "patience=2"], "has no 'patience'; it has initial_scale"),
        (
            [*P, "--rule", "DynamicScale", "growth_interval"],
            "must be given once, as growth_interval=VALUE",
        ),
        (
            [*P, "--rule", "DynamicScale", "min_scale=1", "min_scale=2"],
            "min_scale must be given once",
        ),
        ([*P, "--rule", "DynamicScale", "min_scale=low"], "must be a number such as 0.5 or 2**16"),
        (
            [*P, "--rule", "DynamicScale", "min_scale=2**900"],
            "`min_scale` must be a positive number",
        ),
        (
            [*P, "--rule", "DynamicScale", "growth_interval=2.5"],
            "`growth_interval` must be an integer",
        ),
        ([*P, "--rule", "FixedScale"], "FixedScale needs scale: FixedScale scale=VALUE"),
        ([*P, "--rule", "FixedScale", "128"], "has no '128'; it has scale, skip_nonfinite"),
        (
            [*P, "--rule", "FixedScale", "scale=1", "skip_nonfinite=3"],
            "`skip_nonfinite` must be True or",
        ),
    ],
)
def test_what_cannot_be_used(arguments, message, capsys):
    assert message in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "amax.txt: there is no number in this file"),
        (b"# nothing\n\n", "amax.txt: there is no number in this file"),
        (b"1.0\nloss\n", "amax.txt, line 2: must be the largest |gradient| of a step"),
        (b"1.0\n2.0\n-3\n", "amax.txt, line 3: must be the largest |gradient| of a step"),
        (b"\x89PNG\r\n\x1a\n", "amax.txt: this is no text"),
        (b'{"step": 1}\n', "amax.txt, line 1: a history starts with"),
    ],
)
def test_a_trace_that_cannot_be_read(folder, content, message, capsys):
    (folder / "amax.txt").write_bytes(content)
    assert message in refused(["--trace", "amax.txt"], capsys)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("DynamicScale", DynamicScale()),
        ("DynamicScale overflows_before_backoff=2", DynamicScale(overflows_before_backoff=2)),
        (
            "DynamicScale initial_scale=2.0**-3 min_scale=0.0625 growth_interval=40 max_scale=1e6",
            DynamicScale(0.125, 40, min_scale=0.0625, max_scale=1e6),
        ),
        ("DynamicScale max_scale=none", DynamicScale()),
        ("FixedScale scale=2**20 skip_nonfinite=true", FixedScale(2**20, skip_nonfinite=True)),
    ],
)
def test_a_rule_as_text(text, rule):
    assert rule_from_words(text.split()) == rule


def test_a_rule_as_text_is_refused_with_a_usage_error():
    with pytest.raises(UsageError, match="there is no rule ''"):
        rule_from_words([""])


@pytest.mark.parametrize(
    ("absent", "arguments", "command"),
    [
        ("rich", [], 'rich not found: pip install "lossscale[demo]"'),
        ("numpy", ["--json"], 'numpy not found: pip install "lossscale[plots]"'),
        ("matplotlib", ["--json", "--plot", "a.png"], 'pip install "lossscale[plots]"'),
    ],
)
def test_missing_packages_give_the_command(absent, arguments, command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, absent, None)
    assert main(["simulate", *P, *arguments]) == 1
    assert command in capsys.readouterr().err


def test_json_needs_neither_rich_nor_matplotlib(monkeypatch, capsys):
    for absent in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, absent, None)
    assert simulated([*P, "--steps", "10"], capsys)["steps"] == 10

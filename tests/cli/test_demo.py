"""`lossscale demo`, run as a command: what it prints, what it writes, and that it is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from lossscale.cli import demo
from lossscale.cli.main import main

EPOCHS = 4
STEPS = EPOCHS * 22


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    picture = tmp_path_factory.mktemp("demo") / "digits.png"
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    # What a user has not set either, who sees what TensorFlow writes.
    for name in ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "error::UserWarning:lossscale", "-m", "lossscale.cli.main"]
    command += ["demo", "--backend", "tensorflow", "--seed", "0"]
    command += ["--epochs", str(EPOCHS), "--output", str(picture)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, encoding="utf-8", timeout=300
    )
    done.picture, done.rows = picture, {}
    for line in done.stdout.splitlines():
        if line.startswith("│"):
            name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            done.rows[name] = cells
    return done


def percent(cell: str) -> float:
    assert re.fullmatch(r"\d+\.\d+%", cell), cell
    return float(cell[:-1])


def test_it_succeeds_without_a_word_on_standard_error(outcome):
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""


def test_the_table_has_the_four_runs(outcome):
    float16 = [f"float16, {scaling}" for scaling in ("no scaling", "fixed", "dynamic")]
    assert list(outcome.rows) == ["float32", *float16]
    for heading in ("accuracy", "flushed", "skipped", "scale", "seconds"):
        assert heading in outcome.stdout


def test_float16_learns_only_with_scaling(outcome):
    accuracy = {name: percent(cells[0]) for name, cells in outcome.rows.items()}
    assert accuracy["float32"] > 90
    assert accuracy["float16, fixed"] > 90
    assert accuracy["float16, dynamic"] > 90
    assert accuracy["float16, no scaling"] < 30


def test_without_scaling_the_gradients_are_flushed(outcome):
    flushed = {name: percent(cells[1]) for name, cells in outcome.rows.items()}
    assert flushed["float32"] == 0
    assert flushed["float16, no scaling"] > 99
    assert flushed["float16, fixed"] < 10
    assert flushed["float16, dynamic"] < 1


def test_skipped_steps_scales_and_seconds(outcome):
    skipped = {name: cells[2] for name, cells in outcome.rows.items()}
    scale = {name: cells[3] for name, cells in outcome.rows.items()}
    assert skipped["float32"] == skipped["float16, no scaling"] == "-"
    assert scale["float32"] == scale["float16, no scaling"] == "-"
    assert skipped["float16, fixed"] == f"0 of {STEPS}"
    assert scale["float16, fixed"] == "2**20"
    # It starts at 2**40 and has to come down: every halving is a skipped step.
    count, of, steps = skipped["float16, dynamic"].split()
    assert 1 <= int(count) <= 15
    assert (of, steps) == ("of", str(STEPS))
    exponent = int(scale["float16, dynamic"].removeprefix("2**"))
    assert 40 - int(count) <= exponent < 40
    assert all(0 < float(cells[4]) < 300 for cells in outcome.rows.values())


def test_it_says_what_was_done_on_purpose(outcome):
    words = " ".join(outcome.stdout.split())
    assert "The loss is averaged over 2**20 outputs" in words
    assert "1024 x 1024 pixels" in words
    assert "on purpose" in words
    assert "Times vary from machine to machine" in words
    assert "starts at 2**40" in words
    assert f"Keras on tensorflow, {EPOCHS} epochs, seed 0" in words


def test_the_text_fits_80_columns_and_shows_progress(outcome):
    for line in outcome.stdout.splitlines():
        # The path of the picture is on one line, however long it is, so that it can be copied.
        assert len(line) <= 80 or line.startswith("Picture: ")
    assert outcome.stdout.count(f"epoch {EPOCHS}/{EPOCHS}") == 4
    assert "\nImporting Keras ...\n" in outcome.stdout
    assert f"Picture: {outcome.picture}\n" in outcome.stdout


def test_it_speaks_before_it_imports_a_framework(monkeypatch, capsys, tmp_path):
    printed = []

    def train_all(*arguments):
        printed.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_train_all", train_all)
    monkeypatch.setattr("lossscale.packages.is_installed", lambda module: True)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for name in ("keras", "tensorflow", "jax", "torch", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo", "--output", str(tmp_path / "demo.png")]) == 130
    assert "learned four ways" in printed[0]


def test_the_picture_is_a_picture(outcome):
    from matplotlib.image import imread

    pixels = imread(outcome.picture)
    height, width, _ = pixels.shape
    assert (width, height) == (1320, 960)
    # Every quarter shows something.
    for rows in (slice(None, height // 2), slice(height // 2, None)):
        for columns in (slice(None, width // 2), slice(width // 2, None)):
            assert pixels[rows, columns, :3].std() > 0.05

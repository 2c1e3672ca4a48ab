"""`lossscale diagnose`: what it prints and draws, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import lossscale
from lossscale.cli import console, diagnose
from lossscale.cli.files import UsageError
from lossscale.cli.main import main
from lossscale.demo import experiment, training

ROWS = 40


@keras.saving.register_keras_serializable("tests")
def divided(labels, predictions):
    return keras.losses.sparse_categorical_crossentropy(labels, predictions) / experiment.OUTPUTS


def save_model(path, loss="sparse_categorical_crossentropy", optimizer="sgd"):
    model = training.build_model("mixed_float16", seed=0)
    if loss is not None:
        model.compile(optimizer, loss)
    model.save(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    # Names that Keras makes up are numbered on by every model before.
    keras.utils.clear_session()
    save_model(folder / "plain.keras")
    wrapped = lossscale.LossScaleOptimizer(keras.optimizers.Adam())
    save_model(folder / "needy.keras", divided, wrapped)
    save_model(folder / "bare.keras", loss=None)
    model = training.build_model("float32", seed=0)
    model.compile(None, "sparse_categorical_crossentropy")
    model.save(folder / "no_optimizer.keras")
    model.compile("sgd")
    model._compile_loss = None
    model.loss = None
    model.save(folder / "no_loss.keras")
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    hidden = keras.layers.concatenate([a, b])
    outputs = [keras.layers.Dense(1, name=name)(hidden) for name in ("one", "two")]
    model = keras.Model([a, b], outputs)
    model.compile("sgd", ["mse", "mse"])
    model.save(folder / "several.keras")

    data = experiment.load_digits(0)
    x, y = data.images[:ROWS], data.labels[:ROWS]
    rng = np.random.default_rng(0)
    several = {"a": rng.normal(size=(9, 3)), "b": rng.normal(size=(9, 2))}
    several |= {"one": np.ones((9, 1)), "two": np.zeros((9, 1))}
    for name, arrays in {
        "data": {"x": x, "y": y},
        "weighted": {"x": x, "y": y, "sample_weight": np.full(ROWS, 2.0**-30)},
        "named": {"input_layer": x, "activation": y},
        "nans": {"x": np.full_like(x, np.nan), "y": y},
        "narrow": {"x": x[:, :, :4], "y": y},
        "flat": {"x": x.reshape(ROWS, 64), "y": y},
        "short": {"x": x, "y": y[:-1]},
        "wrong_targets": {"x": x, "y": x},
        "extra": {"x": x, "y": y, "z": y},
        "no_x": {"y": y},
        "several": several,
        "several_x": {"x": several["a"], "one": several["one"], "two": several["two"]},
        "several_half": {**several, "b": several["b"][:, :1]},
        "nothing": {},
        "texts": {"x": np.array(["a", "b"]), "y": np.array([0, 1])},
        "objects": {"x": np.array([None, {}], object), "y": np.array([0, 1])},
    }.items():
        np.savez(folder / f"{name}.npz", **arrays)
    np.save(folder / "alone.npy", x)
    (folder / "alone.npy").rename(folder / "alone.npz")
    (folder / "empty.npz").touch()
    (folder / "empty.keras").touch()
    (folder / "text.npz").write_text("x,y\n1,2\n")
    (folder / "text.keras").write_text("a model\n")
    for name in ("data.npz", "plain.keras"):
        whole = (folder / name).read_bytes()
        (folder / f"cut_{name}").write_bytes(whole[: len(whole) // 2])
    (folder / "folder.keras").mkdir()
    (folder / "plain.txt").write_bytes((folder / "plain.keras").read_bytes())
    return folder


@pytest.fixture
def run(files, monkeypatch, capsys):
    """Runs the verb among the files; returns the exit status and what it wrote."""
    monkeypatch.chdir(files)

    def run(model, data, *arguments):
        status = main(["diagnose", model, "--data", data, *arguments])
        return (status, *capsys.readouterr())

    return run


def said(err):
    """What was written to standard error but for what says that something takes its time."""
    lines = err.splitlines()
    return [line for line in lines if not re.fullmatch(r"lossscale: .* \(\d+ s\)", line)]


def test_a_model_that_needs_no_scaling(run):
    status, out, err = run("plain.keras", "data.npz")
    assert (status, said(err)) == (0, [])
    assert out.splitlines()[0].endswith(": loss scaling is not needed.")
    assert len(out.splitlines()) <= 12


def test_a_model_that_needs_it(run):
    status, out, err = run("needy.keras", "data.npz", "--batch-size", "8", "--batches", "3")
    assert (status, said(err)) == (0, [])
    first = out.splitlines()[0]
    rule = eval(first.partition("rule = ")[2], {"DynamicScale": lossscale.DynamicScale})
    assert rule.initial_scale > 1
    assert "3 batches" in out


def test_json_is_the_report(run):
    status, out, err = run("needy.keras", "data.npz", "--json")
    assert (status, said(err)) == (0, [])
    read = json.loads(out)
    assert read["verdict"] == "needed"
    (found,) = read["verdicts"].values()
    assert found["rule"]["initial_scale"] > 1


def test_no_gradient_to_compare_is_unknown_and_says_why(run):
    status, out, _ = run("plain.keras", "nans.npz")
    assert status == 0
    assert "unknown: the loss is not finite in float32 already." in out.splitlines()[0]


def test_sample_weights_weigh(run):
    assert "scaling is needed" in run("plain.keras", "weighted.npz")[1].splitlines()[0]


def test_the_tolerance(run):
    for arguments, limit in (([], "10 %"), (["--tolerance", "0.5"], "50 %")):
        out = run("plain.keras", "data.npz", *arguments)[1]
        assert f"(limit {limit})" in out


def test_arrays_may_have_the_names_of_the_model(run):
    named, usual = (run("plain.keras", name)[1] for name in ("named.npz", "data.npz"))
    # The last line has the seconds.
    assert named.splitlines()[:-1] == usual.splitlines()[:-1]


def test_several_inputs_and_outputs_by_their_names(run):
    assert run("several.keras", "several.npz")[0] == 0


def test_what_takes_long_is_said_also_where_nobody_reads(monkeypatch, capfd):
    monkeypatch.setattr(console, "_SHOWN_AFTER", 0.05)
    monkeypatch.setattr(console, "_BETWEEN_LINES", 0.05)
    number = itertools.count(1)
    with console.waiting(lambda: f"batch {next(number)}"):
        time.sleep(0.5)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("lossscale: batch 1 (")
    assert 2 <= len(lines) <= 10


def test_a_damaged_archive_is_no_traceback(files):
    whole = (files / "data.npz").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 8)):
            damaged[place] = rng.integers(256)
        (files / "damaged.npz").write_bytes(damaged)
        with contextlib.suppress(UsageError):
            diagnose._read_arrays(files / "damaged.npz")


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("plain.keras", "absent.npz", "absent.npz: no such file; --data must be an .npz file"),
        ("plain.keras", "folder.keras", "folder.keras: it is a folder"),
        ("plain.keras", "empty.npz", "empty.npz: no .npz file, or it is damaged"),
        ("plain.keras", "cut_data.npz", "cut_data.npz: no .npz file, or it is damaged"),
        ("plain.keras", "text.npz", "text.npz: no .npz file, or it is damaged"),
        ("plain.keras", "alone.npz", "alone.npz: no .npz file, or it is damaged"),
        ("plain.keras", "plain.keras", "plain.keras: no .npz file: 'metadata.json' in it is no a"),
        ("plain.keras", "nothing.npz", "nothing.npz: there is no array in it"),
        (
            "plain.keras",
            "objects.npz",
            "or it is damaged: Object arrays",
        ),
        ("plain.keras", "texts.npz", "`x` must hold numbers. Received: an array of dtype <U1"),
        ("plain.keras", "narrow.npz", "`x` must have the shape (rows, 8, 8) for the input"),
        ("plain.keras", "flat.npz", "`x` must have the shape (rows, 8, 8) for the input"),
        ("plain.keras", "short.npz", "same number of rows, at least one. Found: x (40, 8, 8), y ("),
        ("plain.keras", "wrong_targets.npz", "`y` does not fit what the model returns"),
        ("plain.keras", "extra.npz", "no input or output of the name 'z'"),
        ("plain.keras", "no_x.npz", "no array 'input_layer'; the input is called x or input_layer"),
        ("several.keras", "several_x.npz", "no array 'a', 'b'; the inputs are called a, b"),
        ("several.keras", "several_half.npz", "must have the shape (rows, 2) for the input 'b'"),
        ("absent.keras", "data.npz", "absent.keras: no such file"),
        ("folder.keras", "data.npz", "folder.keras: it is a folder; MODEL must be"),
        ("empty.keras", "data.npz", "empty.keras: the file is empty"),
        ("text.keras", "data.npz", "text.keras: neither an HDF5 file nor a .keras file"),
        (
            "cut_plain.keras",
            "data.npz",
            "cut_plain.keras: neither an HDF5 file nor a .keras file, or it was",
        ),
        ("plain.txt", "data.npz", "MODEL must end in .keras, .h5 or .hdf5"),
        ("bare.keras", "data.npz", "saved without what it was compiled with; call model.compile"),
        ("no_loss.keras", "data.npz", "was compiled without a loss"),
    ],
)
def test_bad_files_give_one_line_and_status_2(run, model, data, message):
    status, out, err = run(model, data)
    assert (status, out) == (2, "")
    (line,) = said(err)
    assert message in line
    assert line.startswith("lossscale: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "2"], "`tolerance` must be a number between 0 and 1"),
        (["--html", "page.txt"], "--html must end in .html"),
        (["--batches", "0"], "--batches: must be an integer from 1"),
        (["--batch-size", "many"], "--batch-size: must be an integer from 1"),
        (["--plot", "picture.txt"], "--plot must end in .png, .pdf, .svg"),
        (["--plot", "nowhere/picture.png"], "a folder that does not exist"),
        (["--backend", "jax"], "already imported with the backend tensorflow"),
        (["--backend", "numpy"], "one of tensorflow, jax, torch"),
    ],
    ids=" ".join,
)
def test_bad_arguments_give_one_line_and_status_2(run, arguments, message):
    status, out, err = run("plain.keras", "data.npz", *arguments)
    assert (status, out) == (2, "")
    (line,) = said(err)
    assert message in line


def test_rows_that_do_not_match_are_found_before_the_model_is_loaded(run, monkeypatch):
    def loaded(path):
        pytest.fail("the model was loaded")

    monkeypatch.setattr("lossscale.cli.diagnose._load_model", loaded)
    assert run("plain.keras", "short.npz")[0] == 2


@pytest.mark.parametrize("arguments", [["diagnose"], ["diagnose", "plain.keras"]], ids=len)
def test_missing_arguments(arguments, capsys):
    assert main(arguments) == 2
    assert "--data" in capsys.readouterr().err


def test_a_layer_that_is_not_known(files, run):
    class Unheard(keras.layers.Dense):
        pass

    model = keras.Sequential([keras.Input((8, 8, 1)), Unheard(1)])
    model.compile("sgd", "mse")
    model.save(files / "unheard.keras")
    status, _, err = run("unheard.keras", "data.npz")
    assert status == 2
    (line,) = said(err)
    assert "unheard.keras: Keras cannot load it" in line


def test_what_is_written_while_keras_is_imported_is_dropped(files, tmp_path):
    # TensorFlow's own notes: test_demo.py runs a command that imports it.
    lines = ["import os, sys", "os.write(2, b'one note')", "print('another note', file=sys.stderr)"]
    (tmp_path / "keras.py").write_text("\n".join([*lines, "raise ImportError('it is broken')"]))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lossscale.cli.main",
            "diagnose",
            *("plain.keras", "--data", "data.npz"),
        ],
        cwd=files,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode != 0
    assert "it is broken" in done.stderr
    assert "note" not in done.stderr

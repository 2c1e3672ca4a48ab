"""`lossscale-migrate`: what it prints, what it writes, and what it refuses."""

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from lossscale_migration.__main__ import main

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
CHECKPOINTS = sorted(FIXTURES.glob("ck*/*.index"))
MODELS = sorted(FIXTURES.glob("h5/*.h5"))
# By the end of a file's name.
ERAS = {
    "exp": "TensorFlow 2.0 to 2.",
    "new": "TensorFlow 2.",
    "legacy": "optimizers.legacy",
    "v3": "new optimizers",
}


def stem(path):
    return path.stem.removesuffix("-1")


def described(path, capsys):
    assert main([str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{stem(path)}")
def test_json_says_what_a_checkpoint_holds(path, capsys):
    found = described(path, capsys)
    assert (found["form"], found["written"]) == ("checkpoint", None)
    assert found["path"] == str(path).removesuffix(".index")
    new, fixed = "v3" in path.name, path.parent.name == "ckf"
    (optimizer,) = found["optimizers"]
    assert ERAS[stem(path).rpartition("_")[2]] in optimizer.pop("era")
    assert (optimizer.pop("scaling") == "dynamic") != fixed
    assert optimizer == {
        "path": "optimizer",
        "optimizer": None if new else "SGD",
        "scale": None if fixed else 8.0,
        "good_steps": None if fixed else 1,
        "iterations": 1,
        "learning_rate": pytest.approx(0.1),
        "slots": {"momentums" if new else "momentum": 1},
        "settings": {} if new else {"decay": 0.0, "momentum": pytest.approx(0.9)},
    }


@pytest.mark.parametrize("path", MODELS, ids=stem)
def test_json_says_what_a_model_holds(path, capsys):
    found = described(path, capsys)
    assert (found["form"], found["written"]) == ("HDF5 model", None)
    (optimizer,) = found["optimizers"]
    assert ERAS[stem(path).rpartition("_")[2]] in optimizer["era"]
    assert optimizer["optimizer"] == "SGD"
    assert (optimizer["scaling"], optimizer["scale"]) == ("dynamic", 8.0)
    # Model files of TensorFlow hold neither the current scale nor its counter.
    assert optimizer["good_steps"] is None
    assert optimizer["iterations"] == 1
    assert optimizer["slots"] == {"m" if "v3" in path.name else "momentum": 2}


def test_the_text(capsys):
    assert main([str(FIXTURES / "ck" / "2.0.4_exp-1")]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("2.0.4_exp-1: checkpoint")
    rows = dict(row.strip().split(maxsplit=1) for row in rows)
    assert rows == {
        "path": "optimizer",
        "era": "TensorFlow 2.0 to 2.2",
        "optimizer": "SGD",
        "scaling": "dynamic",
        "scale": "8",
        "good_steps": "1",
        "iterations": "1",
        "learning_rate": "0.1",
        "settings": "decay=0, momentum=0.9",
        "slots": "momentum=1",
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_is_written_for_keras(as_json, tmp_path, capsys):
    import keras

    old, new = MODELS[0], tmp_path / "new.keras"
    assert main([str(old), str(new), *(["--json"] if as_json else [])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    if as_json:
        assert json.loads(out)["written"] == str(new)
    else:
        assert f"written: {new}" in out
    optimizer = keras.saving.load_model(new).optimizer
    assert repr(optimizer).startswith("<LossScaleOptimizer")
    assert int(optimizer.iterations) == 1
    assert list(tmp_path.iterdir()) == [new]


def test_a_checkpoint_is_written_for_one_line_without_tensorflow(tmp_path):
    new = tmp_path / "new.h5"
    assert main([str(CHECKPOINTS[0]), str(new), "--json"]) == 0
    program = f"""
import sys
sys.modules["tensorflow"] = None
import keras, lossscale
from lossscale_migration import restore_checkpoint
v = keras.Variable([5.0])
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.9))
restore_checkpoint({str(new)!r}, optimizer=optimizer, v=v)
print(float(v[0]), float(optimizer.loss_scale), int(optimizer.iterations))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    value, scale, steps = done.stdout.split()
    assert (float(value), scale, steps) == (pytest.approx(0.8), "8.0", "1")


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_data(path):
    data = path.with_suffix(".data-00000-of-00001")
    shutil.copy(CHECKPOINTS[0].with_suffix(data.suffix), data)
    half(data)


EMPTY, EMPTY_ZIP, TEXT = b"", b"PK\x05\x06" + b"\0" * 18, b"hello"
# What is copied, under which name, what is written in its place or done to it, and the reason.
BAD = {
    "missing": (None, "nothing.h5", None, "no such file"),
    "missing checkpoint": (None, "nothing", None, "no such file or checkpoint"),
    "empty model": (MODELS[0], "a.h5", EMPTY, "the file is empty"),
    "empty": (MODELS[0], "a.bin", EMPTY, "the file is empty"),
    "text of any name": (MODELS[0], "a.bin", TEXT, "neither"),
    "text": (MODELS[0], "a.h5", TEXT, "neither an HDF5 file nor"),
    "cut model": (MODELS[0], "a.h5", half, "damaged or incomplete"),
    "cut v3": (MODELS[-2], "a.h5", half, "damaged or incomplete"),
    "cut index": (CHECKPOINTS[0], "a.index", half, "damaged or incomplete"),
    "empty index": (CHECKPOINTS[0], "a.index", EMPTY, "damaged"),
    "no data": (CHECKPOINTS[0], "a.index", None, "damaged or incomplete"),
    "cut data": (CHECKPOINTS[0], "a.index", cut_data, "damaged or incomplete"),
    "zip": (None, "a.keras", EMPTY_ZIP, "without config"),
}


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_the_reason(name, new, tmp_path, refused):
    source, called, change, reason = BAD[name]
    old = tmp_path / called
    if source is not None:
        shutil.copy(source, old)
    if isinstance(change, bytes):
        old.write_bytes(change)
    elif change is not None:
        change(old)
    before = sorted(tmp_path.iterdir())
    target = tmp_path / ("new.keras" if called.endswith((".h5", ".keras")) else "new.h5")
    err = refused(old, *([target] if new else []))
    assert str(tmp_path / old.stem) in err
    assert reason in err
    assert sorted(tmp_path.iterdir()) == before


def test_an_optimizer_that_is_not_known_is_shown_and_not_written(tmp_path, capsys, refused):
    import h5py

    old, new = tmp_path / "old.h5", tmp_path / "new.keras"
    shutil.copy(FIXTURES / "h5" / "2.4.4_new.h5", old)
    with h5py.File(old, "r+") as file:
        text = file.attrs["training_config"]
        file.attrs["training_config"] = text.replace('"SGD", "config"', '"Unheard", "config"')
    assert described(old, capsys)["optimizers"][0]["optimizer"] == "Unheard"
    err = refused(old, new)
    assert str(old) in err
    assert "'Unheard'" in err
    assert not new.exists()


def test_a_checkpoint_without_an_optimizer(tmp_path, refused):
    import tensorflow as tf

    path = tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "a"))
    assert "does not contain an optimizer" in refused(path)


@pytest.mark.parametrize(
    ("old", "name"), [(MODELS[0], "new.keras"), (CHECKPOINTS[0], "new.h5")], ids=["model", "ck"]
)
def test_an_existing_file_is_kept_unless_forced(old, name, tmp_path, capsys, refused):
    new = tmp_path / name
    new.write_text("precious")
    assert "this file exists. Nothing was written." in refused(old, new)
    assert new.read_text() == "precious"
    assert main([str(old), str(new), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == str(new)
    assert new.stat().st_size > 1000
    assert list(tmp_path.iterdir()) == [new]


def test_a_forced_file_is_kept_if_the_old_one_is_damaged(tmp_path, refused):
    old, new = tmp_path / "old.h5", tmp_path / "new.keras"
    old.write_bytes(MODELS[0].read_bytes()[:3000])
    new.write_text("precious")
    refused(old, new, "--force")
    assert new.read_text() == "precious"


@pytest.mark.parametrize(
    ("old", "name", "reason"),
    [
        (MODELS[0], "new.h5", "a model converts to a file that ends in .keras"),
        (CHECKPOINTS[0], "new.keras", "a checkpoint converts to a file that ends in .h5"),
        (MODELS[0], "nowhere/new.keras", "its folder does not exist"),
        (MODELS[0], "folder.keras", "is a folder"),
    ],
)
def test_where_nothing_can_be_written(old, name, reason, tmp_path, refused):
    (tmp_path / "folder.keras").mkdir()
    err = refused(old, tmp_path / name)
    assert reason in err
    assert str(tmp_path / name) in err


def test_a_difference_is_said_on_standard_error(tmp_path, capsys):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    wrapped = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.Nadam())
    model.compile(wrapped, "mse")
    with pytest.warns(UserWarning, match="HDF5"):
        model.save(tmp_path / "old.h5")
    assert main([str(tmp_path / "old.h5"), str(tmp_path / "new.keras"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["optimizers"][0]["optimizer"] == "Nadam"
    assert err.startswith("lossscale: warning: ")
    assert "schedule_decay=0.004" in err
    assert err.count("\n") == 1


KILLED = """
import os, signal, sys
from lossscale_migration import conversion

def write(graph, path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

conversion.write_hdf5 = write
conversion.is_checkpoint = conversion.read_graph = conversion.find_optimizers = lambda path: True
conversion.migrate_file("old", sys.argv[1])
"""


def test_what_a_killed_command_leaves(tmp_path):
    new = tmp_path / "new.h5"
    killed = subprocess.run([sys.executable, "-c", KILLED, new], check=False, capture_output=True)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    assert {each.name for each in left.iterdir()} == {"owner", "new.h5"}
    # Those of another file, of a process that goes on, with something besides, and of others.
    for name, mark, more in (
        ("other", b"lossscale-migrate, for other.h5", []),
        ("held", b"lossscale-migrate, for new.h5", []),
        ("more", b"lossscale-migrate, for new.h5", ["more"]),
        ("empty", b"", []),
    ):
        folder = tmp_path / f".lossscale-{name}"
        folder.mkdir()
        (folder / "owner").write_bytes(mark)
        for each in more:
            (folder / each).touch()
    (tmp_path / ".lossscale-bare").mkdir()
    (tmp_path / ".lossscale-link").symlink_to(left, target_is_directory=True)
    others = set(tmp_path.iterdir()) - {left}
    with open(tmp_path / ".lossscale-held" / "owner") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([str(CHECKPOINTS[0]), str(new)]) == 0
    assert set(tmp_path.iterdir()) == {*others, new}

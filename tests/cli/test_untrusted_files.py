"""Whatever is in a file: one printable line and exit status 2, or a result, and no traceback."""

import io
import json
import re
import struct
import zipfile

import h5py
import keras
import numpy as np
import pytest

from lossscale import DynamicScale, migration
from lossscale.cli import diagnose
from lossscale.cli.main import main
from lossscale.errors import ArgumentError, OldFileError
from lossscale.migration import describe_file
from lossscale.monitoring import HistoryHeader, StepRecord, TrainingHistory

HOSTILE = "\x1b]0;title\x07\x9b31m\u202e\u2028red"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answered(arguments, capsys):
    """Runs a command; it may do what it is asked to, or say in one line why not."""
    status = main(arguments)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not re.fullmatch(r".* \(\d+ s\)", line)]
    assert all(line.isprintable() for line in out.split("\n"))
    assert all(line.isprintable() for line in lines)
    if status:
        assert (status, out, len(lines)) == (2, "", 1)
        assert lines[0].startswith("lossscale: ")
        assert len(lines[0]) < 3000
    return status


# --- Arrays ---------------------------------------------------------------------------------------


def cut(whole, rng):
    return whole[: rng.integers(len(whole))]


def flipped(whole, rng):
    changed = bytearray(whole)
    for _ in range(3):
        changed[rng.integers(len(whole))] ^= 1 << rng.integers(8)
    return bytes(changed)


def wrong_headers(whole, rng):
    starts = [found.start() for found in re.finditer(b"PK|NUMPY", whole)]
    changed = bytearray(whole)
    place = starts[rng.integers(len(starts))] + rng.integers(100)
    changed[min(place, len(whole) - 1)] = rng.integers(256)
    return bytes(changed)


def rewritten(whole, rng, change):
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(file, "w") as new:
        for number, name in enumerate(old.namelist()):
            new.writestr(*change(number, name, old.read(name), rng))
    return file.getvalue()


def wrong_descriptions(whole, rng):
    def change(number, name, content, rng):
        content = bytearray(content)
        content[10 + rng.integers(60)] = rng.choice(list(b"0123456789<>|fiubcSUOVMm(),:{}\x1b"))
        return name, bytes(content)

    return rewritten(whole, rng, change)


def wrong_names(whole, rng):
    names = ["x", "x.npy", f"{HOSTILE}.npy", "a\n.npy", "../x.npy", "y" * 60_000 + ".npy"]
    first = rng.integers(len(names))
    return rewritten(
        whole, rng, lambda number, name, content, rng: (names[first - number], content)
    )


def other_arrays(whole, rng):
    kinds = ["?", "u1", "i8", "f2", "g", "F", ">f4", "S3", "U2", "M8[s]", "V4"]
    shapes = [(16, 3), (16,), (), (0, 3), (16, 3, 1)]
    arrays = {
        name: np.zeros(shapes[rng.integers(len(shapes))], kinds[rng.integers(len(kinds))])
        for name in "xy"
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


MUTATIONS = [cut, flipped, wrong_headers, wrong_descriptions, wrong_names, other_arrays]


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_arrays(mutation, model, folder, monkeypatch, capsys):
    model.save("model.keras")
    monkeypatch.setattr(diagnose, "_load_model", lambda path: model)
    np.savez("data.npz", x=np.ones((16, 3), "float32"), y=np.zeros((16, 1), "float32"))
    whole, rng = (folder / "data.npz").read_bytes(), np.random.default_rng(0)
    found = set()
    for _ in range(6):
        (folder / "data.npz").write_bytes(mutation(whole, rng))
        found.add(answered(["diagnose", "model.keras", "--data", "data.npz"], capsys))
    assert 2 in found


def bomb(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (start, zeros) in members.items():
            with archive.open(name.replace("_", "."), "w", force_zip64=True) as member:
                member.write(start)
                for _ in range(zeros):
                    member.write(bytes(2**20))
    return file.getvalue()


def claimed(content, name, size):
    """The zip file, with another size of a member in its directory."""
    content = bytearray(content)
    at = content.rindex(name.encode()) - 46
    content[at + 24 : at + 28] = struct.pack("<I", size)
    return bytes(content)


def test_a_small_zip_that_expands(folder, refused, model):
    model.save("model.keras")
    small = claimed(bomb(x_npy=(b"", 1)), "x.npy", 2**30)
    (folder / "data.npz").write_bytes(small)
    assert "expand to 1073741824" in refused("diagnose", "model.keras", "--data", "data.npz")
    small = claimed(bomb(model_h5=(b"", 1)), "model.h5", 2**30)
    (folder / "old.keras").write_bytes(small)
    assert "expand to 1073741824" in refused("migrate", "old.keras")
    with pytest.raises(OldFileError, match="expand to 1073741824"):
        describe_file("old.keras")
    (folder / "old.keras").write_bytes(bomb(config_json=(b"", 33)))
    assert "config.json has 34603008 bytes" in refused("migrate", "old.keras")


# --- Models ---------------------------------------------------------------------------------------


def with_configuration(path, text):
    """A `.keras` file and an HDF5 file whose optimizer is described by a text of JSON."""
    weights = io.BytesIO()
    with h5py.File(weights, "w"):
        pass
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", f'{{"compile_config": {{"optimizer": {text}}}}}')
        archive.writestr("model.weights.h5", weights.getvalue())
    return path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("deep", [201, 900, 100_000])
@pytest.mark.parametrize("way", [[], ["--json"]], ids=["table", "json"])
def test_a_configuration_nested_deep(deep, way, refused, monkeypatch):
    monkeypatch.setattr(migration, "check_file", lambda path: None)
    nested = '{"class_name": "Adam", "config": {"rate": %s}}' % ("[" * deep + "]" * deep)
    with_configuration("old.keras", nested)
    assert "nested more than 200 deep" in refused("migrate", "old.keras", *way)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("value", [HOSTILE, "[red]", "x" * 2**20, "\ud800", 10**400, 1e308])
@pytest.mark.parametrize("way", [[], ["--json"]], ids=["table", "json"])
def test_hostile_settings(value, way, capsys, monkeypatch):
    # What reads it in a process of its own reads no configuration.
    monkeypatch.setattr(migration, "check_file", lambda path: None)
    for config in (
        {"class_name": "Adam", "config": {"learning_rate": 0.1, "beta_1": value}},
        {"class_name": value, "config": {"learning_rate": value}},
        {"class_name": "Adam", "config": {"inner_optimizer": value, "initial_scale": value}},
        {"class_name": "Adam", "config": value},
        value,
    ):
        with_configuration("old.keras", json.dumps(config))
        answered(["migrate", "old.keras", *way], capsys)


# --- Histories ------------------------------------------------------------------------------------


def history_lines():
    header = HistoryHeader.of(DynamicScale(), {"torch": "2.0"})
    record = StepRecord(
        2, 8.0, True, loss=1.0, nonfinite=[("a", 1, 0)], wrong=("b", 0.5), alarms=[("c", "d")]
    )
    return [
        {
            "lossscale_history": 1,
            "rule": header.rule,
            "versions": header.versions,
            "started": header.started,
        },
        {"step": 1, "scale": 8.0, "skipped": False, "loss": 2.0, "steps_skipped": 0},
        record.to_json(),
    ]


VALUES = [
    1.7e308,
    -1e308,
    1e-320,
    10**309,
    -1,
    0,
    True,
    None,
    [],
    {},
    "\ud800",
    HOSTILE,
    "x" * 9999,
]


@pytest.mark.parametrize("command", ["plot", "page", "simulate"])
def test_hostile_histories(command, folder, capsys):
    arguments = {
        "plot": ["plot", "run.jsonl", "-o", "run.svg"],
        "page": ["plot", "run.jsonl", "--html", "run.html"],
        "simulate": ["simulate", "--rule", "DynamicScale", "--trace", "run.jsonl"],
    }[command]
    rng = np.random.default_rng(0)
    for value in VALUES:
        lines = history_lines()
        line = lines[rng.integers(3)]
        key = list(line)[rng.integers(len(line))]
        line[key] = value
        (folder / "run.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        answered(arguments, capsys)
    for key in ("versions", "started", "nonfinite", "alarms", "wrong"):
        lines = history_lines()
        old = json.dumps(lines[key not in lines[0] and 2][key])
        text = "".join(json.dumps(each) + "\n" for each in lines)
        new = re.sub('"[a-d2][^"]*"', lambda found: json.dumps("\ud800" + HOSTILE), old)
        (folder / "run.jsonl").write_text(text.replace(old, new))
        assert answered(arguments, capsys) == 2


def test_a_line_without_an_end(folder, refused):
    path = folder / "run.jsonl"
    for start in ([], history_lines()):
        text = "".join(json.dumps(each) + "\n" for each in start)
        path.write_text(text + "{" + " " * 2**24)
        assert "more than 16777216 bytes" in refused("plot", "run.jsonl", "-o", "run.svg")
    with pytest.raises(
        ArgumentError, match=r"`started`.* \[\.\.\. \d+ characters \.\.\.\]"
    ) as caught:
        HistoryHeader.from_json({"lossscale_history": 1, "rule": "x" * 10**6})
    assert len(str(caught.value)) < 2100


def test_a_hostile_name_is_drawn_and_shown_as_it_is_written(folder, capsys):
    header = HistoryHeader.of(DynamicScale())
    records = [StepRecord(1, 8.0, True, nonfinite=[(HOSTILE, 1, 0)], alarms=[("kind", HOSTILE)])]
    TrainingHistory(header, records).write("run.jsonl")
    assert main(["plot", "run.jsonl", "-o", "run.svg"]) == 0
    out = capsys.readouterr().out
    assert r"\x1b]0;title\x07\x9b31m\u202e\u2028red" in out

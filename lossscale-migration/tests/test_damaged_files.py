"""Whatever is done to a file, its readers end with one of this library's errors."""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys

import pytest

import damaged
from lossscale.errors import OldFileError, UnsupportedError
from lossscale_migration import check_file, damaged_files, describe_file, hdf5_reader, load_model
from lossscale_migration.__main__ import main
from support import FIXTURES

ZOO = FIXTURES / "zoo" / "2.15.1"
ZIPPED, HDF5 = ZOO / "s_dense_new.keras", ZOO / "s_dense_new.h5"


def flipped(path, numbers):
    return (damaged.flipped(path.read_bytes(), number) for number in numbers)


def with_config_changed(numbers):
    for number in numbers:
        yield damaged.changed_member(
            ZIPPED, "config.json", lambda text, n=number: damaged.changed_json(text, n).encode()
        )


DAMAGED = {
    # With number 1673 zipfile raises EOFError.
    "bytes.keras": (lambda: flipped(ZIPPED, [*range(1000), 1673]), describe_file, 100),
    "description.keras": (lambda: with_config_changed(range(200)), describe_file, 200),
    **{
        f"model for {name}.keras": (
            lambda: with_config_changed(range(60)),
            functools.partial(load_model, framework=name),
            60,
        )
        for name in ("keras", "tf_keras")
    },
}


WARNS = {"marks": pytest.mark.filterwarnings("ignore")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, **(WARNS if "model" in name else {})) for name in DAMAGED]
)
def test_damage_is_refused_by_an_error_of_ours(name, tmp_path):
    contents, read, most = DAMAGED[name]
    path = tmp_path / name
    readable = 0
    for content in contents():
        path.write_bytes(content)
        with contextlib.suppress(OldFileError):
            read(path)
            readable += 1
    assert 0 < readable < most


def read_in_a_child(path, folder, count):
    """The outcome for each number; of those that ended the child, its exit status."""
    outcomes, first = {}, 0
    while first < count:
        done = subprocess.run(
            [sys.executable, damaged.__file__, path, folder, str(first), str(count)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        for line in lines:
            number, _, what = line.partition(" ")
            outcomes[int(number)] = what or done.returncode
        assert lines, done.stderr
        first = int(lines[-1].partition(" ")[0]) + 1
    return outcomes


def test_the_bytes_of_an_hdf5_file(tmp_path, monkeypatch):
    outcomes = read_in_a_child(HDF5, tmp_path, 200)
    assert len(outcomes) == 200
    ended = [number for number, what in outcomes.items() if isinstance(what, int)]
    others = [what for what in outcomes.values() if not isinstance(what, int)]
    assert set(others) == {"read", "refused"}
    # Those that ended the child: crashes, and reading without an end. It takes a second each.
    monkeypatch.setattr(damaged_files, "_SECONDS", 1.0)
    path = tmp_path / "damaged.h5"
    for content in flipped(HDF5, ended[:2]):
        path.write_bytes(content)
        with pytest.raises(OldFileError, match=r"damaged\.h5: damaged"):
            load_model(path, check_first=True)


PROGRAMS = {
    "crash": ("import os; os.abort()", "reading it crashes the HDF5 library"),
    "no end": ("while True: pass", "the HDF5 library does not come to an end with it"),
    "asleep": ("import time; time.sleep(60)", "the HDF5 library does not come to an end with it"),
}


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of processor time")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_reading_can_end_with(name, tmp_path, monkeypatch, capsys):
    body, message = PROGRAMS[name]
    program = tmp_path / "program.py"
    whole = pathlib.Path(hdf5_reader.__file__).read_text()
    start = whole.index("    import h5py\n\n    if zipfile")
    program.write_text(f"{whole[:start]}    {body}\n\n\n{whole[whole.index('def _limit') :]}")
    monkeypatch.setattr(hdf5_reader, "__file__", str(program))
    # Only what does not end is waited for: on a busy machine, an interpreter starts late.
    if name != "crash":
        monkeypatch.setattr(damaged_files, "_SECONDS", 1.0)
    if name == "asleep":
        monkeypatch.setattr(damaged_files, "_PATIENCE", 1.5)
    with pytest.raises(OldFileError, match=message):
        load_model(HDF5, check_first=True)
    if name != "no end":  # It would take a second of a processor once more.
        assert main([str(HDF5)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
        assert str(HDF5) in err
    # Without being asked to, load_model does not start another program.
    load_model(HDF5, framework="tf_keras")


def test_a_good_file_passes():
    for path in (ZIPPED, HDF5, FIXTURES / "h5" / "2.0.4_exp.h5"):
        check_file(path)


def test_the_hdf5_file_in_a_keras_file_is_read_too(tmp_path):
    path = tmp_path / "damaged.keras"

    def change(content):
        at = content.index(b"HEAP")
        return content[:at] + b"JUNK" + content[at + 4 :]

    path.write_bytes(damaged.changed_member(ZIPPED, "model.weights.h5", change))
    with pytest.raises(OldFileError, match=r"damaged\.keras: damaged or incomplete: "):
        check_file(path)


def test_an_array_that_is_larger_than_its_file(tmp_path):
    import h5py

    path = tmp_path / "damaged.h5"
    with h5py.File(path, "w") as file:
        # The numbers are nowhere: HDF5 makes them when they are read.
        file.create_dataset("weight", shape=(2**40,), dtype="float32")
    with pytest.raises(OldFileError, match=r"weight is an array of 4398046511104 bytes"):
        check_file(path)


def test_other_files_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "missing", tmp_path):
        check_file(path)


def test_where_there_is_no_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(UnsupportedError, match="needs a Python interpreter"):
        check_file(HDF5)

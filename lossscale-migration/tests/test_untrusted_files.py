"""Whatever is in a file: one printable line and exit status 2, or a result, and no traceback."""

import io
import json
import re
import struct
import zipfile

import h5py
import pytest

import lossscale_migration as migration
from lossscale.errors import OldFileError
from lossscale_migration import describe_file
from lossscale_migration.__main__ import main

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


def test_a_small_zip_that_expands(folder, refused):
    small = claimed(bomb(model_h5=(b"", 1)), "model.h5", 2**30)
    (folder / "old.keras").write_bytes(small)
    assert "expand to 1073741824" in refused("old.keras")
    with pytest.raises(OldFileError, match="expand to 1073741824"):
        describe_file("old.keras")
    (folder / "old.keras").write_bytes(bomb(config_json=(b"", 33)))
    assert "config.json has 34603008 bytes" in refused("old.keras")


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
    assert "nested more than 200 deep" in refused("old.keras", *way)


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
        answered(["old.keras", *way], capsys)

"""The command line: arguments, messages, exit statuses, and what it imports."""

import json
import shlex
import subprocess
import sys

import pytest

import lossscale
from lossscale.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VERB"),
        (["train"], "train"),
        (["migrate", "old.h5"], "pip install lossscale-migration, which has"),
        (["info", "--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("lossscale: ")
    assert message in err


def test_an_interrupted_command_prints_no_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("lossscale.cli._info", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version(argument):
    command = [sys.executable, "-m", "lossscale", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "lossscale" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "path", "status"),
    [("info", "/dev/full", 1)],
)
def test_what_cannot_be_read_or_written_is_one_line(arguments, path, status):
    command = [sys.executable, "-m", "lossscale", *arguments.split()]
    with open(path, "w") as stream:
        done = subprocess.run(
            command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert done.stderr.startswith("lossscale: ")


def test_a_reader_that_closes_the_output_ends_it_without_a_line():
    command = f"{shlex.quote(sys.executable)} -m lossscale info | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("variable", "content", "expected"),
    [
        ("jax", '{"backend": "torch"}', "jax"),
        (None, '{"backend": "torch"}', "torch"),
        ("", '{"backend": "torch"}', "torch"),
        (None, "{", "tensorflow"),
        (None, "[]", "tensorflow"),
        (None, '{"floatx": "float32"}', "tensorflow"),
        (None, None, "tensorflow"),
    ],
)
def test_info_reports_the_backend_that_keras_uses(
    variable, content, expected, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("KERAS_BACKEND", variable)
    if content is not None:
        (tmp_path / "keras.json").write_text(content)
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keras_backend"] == expected


@pytest.mark.parametrize("way", [[], ["--json"]], ids=["text", "json"])
def test_info_reports_what_is_installed_and_what_is_not(way, monkeypatch, tmp_path, capsys):
    known = {"torch": ["torch-nightly"], "tensorflow": ["tensorflow-cpu"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: known)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.0 of {name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / "nvidia-smi"
    command.touch(0o755)
    command.write_text("#!/bin/sh\necho 'NVIDIA T4'; echo 'NVIDIA T4'\n")
    assert main(["info", *way]) == 0
    out = capsys.readouterr().out
    if way:
        found = json.loads(out)
        assert found["gpus"] == ["NVIDIA T4", "NVIDIA T4"]
        found |= found["packages"]
    else:
        found = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert found["gpus"] == "NVIDIA T4, NVIDIA T4"
    assert found["tensorflow"] == "1.0 of tensorflow-cpu"
    assert found["torch"] == "1.0 of torch-nightly"
    assert found["jax"] == (None if way else "-")
    command.write_text("#!/bin/sh\necho 'no driver' >&2; exit 9\n")
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == []


def test_info_imports_no_framework():
    code = "import sys\nfrom lossscale.cli import main\nmain(['info', '--json'])\n"
    code += "print({'keras', 'torch', 'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed, _, imported = done.stdout.rstrip().rpartition("\n")
    assert json.loads(printed)["lossscale"] == lossscale.__version__
    assert imported == "set()"

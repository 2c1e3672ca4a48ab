"""The command line: arguments, messages, exit statuses, and what it imports."""

import shlex
import subprocess
import sys

import pytest

import lossscale
from lossscale.cli import main


def run(*command, **options):
    """A command in a process of its own."""
    return subprocess.run(command, text=True, check=False, stderr=subprocess.PIPE, **options)


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
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("lossscale.cli._info", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


def test_what_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as stream:
        done = run(sys.executable, "-m", "lossscale", "info", stdout=stream)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("lossscale: ")
    # A reader that closes the output ends it without a line.
    assert run(f"{shlex.quote(sys.executable)} -m lossscale info | true", shell=True).stderr == ""


def info(capsys):
    """What is printed, by name."""
    assert main(["info"]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("variable", "content", "expected"),
    [
        ("jax", '{"backend": "torch"}', "jax"),
        ("", '{"backend": "torch"}', "torch"),
        ("", "{", "tensorflow"),
        ("", "[]", "tensorflow"),
        ("", '{"floatx": "float32"}', "tensorflow"),
        ("", None, "tensorflow"),
    ],
)
def test_info_reports_the_backend_that_keras_uses(
    variable, content, expected, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", variable)
    if content is not None:
        (tmp_path / "keras.json").write_text(content)
    assert info(capsys)["keras_backend"] == expected


def test_info_reports_what_is_installed_and_what_is_not(monkeypatch, tmp_path, capsys):
    known = {"torch": ["torch-nightly"], "tensorflow": ["tensorflow-cpu"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: known)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.0 of {name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / "nvidia-smi"
    command.touch(0o755)
    command.write_text("#!/bin/sh\necho 'NVIDIA T4'; echo 'NVIDIA T4'\n")
    found = info(capsys)
    assert found["gpus"] == "NVIDIA T4, NVIDIA T4"
    assert found["tensorflow"] == "1.0 of tensorflow-cpu"
    assert found["torch"] == "1.0 of torch-nightly"
    assert found["jax"] == "-"
    command.write_text("#!/bin/sh\necho 'no driver' >&2; exit 9\n")
    assert info(capsys)["gpus"] == "-"


def test_info_imports_no_framework():
    code = "import sys\nfrom lossscale.cli import main\nmain(sys.argv[1:])\n"
    code += "print({'keras', 'torch', 'jax', 'numpy'} & set(sys.modules))"
    printed = run(sys.executable, "-c", code, "info", stdout=subprocess.PIPE).stdout
    assert f"lossscale      {lossscale.__version__}\n" in printed
    assert printed.endswith("set()\n")
    assert "lossscale" in run(sys.executable, "-m", "lossscale", "--version", stdout=-1).stdout

"""The command line: arguments, messages, exit statuses, and what it imports."""

import json
import subprocess
import sys

import pytest

import lossscale
from lossscale.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "VERB"), (["train"], "train"), (["info", "--frobnicate"], "--frobnicate")],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, message, refused):
    assert message in refused(*arguments)


def test_a_missing_package_gives_one_line_with_the_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert main(["migrate", "model.h5"]) == 1
    assert capsys.readouterr().err == 'lossscale: h5py not found: pip install "lossscale[keras]"\n'


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "lossscale" in capsys.readouterr().out


def test_info_names_versions_and_imports_no_framework():
    code = "import sys\nfrom lossscale.cli import main\nmain(['info', '--json'])\n"
    code += "print({'keras', 'torch', 'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed, _, imported = done.stdout.rstrip().rpartition("\n")
    assert json.loads(printed)["lossscale"] == lossscale.__version__
    assert imported == "set()"


def test_python_m_lossscale_is_the_command():
    command = [sys.executable, "-m", "lossscale", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"lossscale {lossscale.__version__}\n"

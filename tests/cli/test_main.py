"""The command line without training: arguments, messages, exit statuses and terminals."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest

import lossscale
from lossscale.cli import arguments, demo
from lossscale.cli import console as consoles
from lossscale.cli.main import main
from lossscale.demo.experiment import RECIPES, Run
from lossscale.demo.output import print_table


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path):
    """A bad argument must be found before anything is trained or written."""

    def trained(*arguments):
        pytest.fail(f"trained with {arguments}")

    monkeypatch.setattr(demo, "_train_all", trained)
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VERB"),
        (["train"], "train"),
        (["demo", "--frobnicate"], "--frobnicate"),
        (["demo", "--epochs", "0"], "--epochs: must be an integer from 1 to 1000, not '0'"),
        (["demo", "--epochs", "-3"], "--epochs"),
        (["demo", "--epochs", "2.5"], "--epochs"),
        (["demo", "--seed", "x"], "--seed: must be an integer from 0 to 4294967295, not 'x'"),
        (["demo", "--seed", str(2**32)], "--seed"),
        (["demo", "--output", "demo.txt"], "must end in .png, .pdf, .svg. Received: 'demo.txt'"),
        (["demo", "--output", "nowhere/demo.png"], "a folder that does not exist: 'nowhere'"),
        (["demo", "--output", "folder.svg"], "is a folder: 'folder.svg'"),
        (["demo", "--output", "/proc/a.png"], "cannot be written: '/proc/a.png': No such file"),
        (["demo", "--output", f"{'a' * 300}.png"], "File name too long"),
        (["demo", "--backend", "numpy"], "torch, torch-native, optax, not 'numpy'"),
        (["demo", "--backend", ""], "one of tensorflow, jax, torch"),
        (["info", "--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, message, tmp_path, refused):
    (tmp_path / "folder.svg").mkdir()
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    "command",
    [["info"], ["info", "--json"], ["simulate", "--overflow-probability", "0.1", "--json"]],
    ids=" ".join,
)
def test_a_full_disk_behind_the_output_is_one_line(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lossscale", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "lossscale: No space left on device\n")


def test_a_closed_output_is_one_line():
    command = f"{sys.executable} -m lossscale info >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "lossscale: the standard output is closed\n")


def test_an_output_without_the_letters_is_no_traceback():
    command = ["simulate", "--overflow-probability", "0.01", "--steps", "2000"]
    done = subprocess.run(
        [sys.executable, "-m", "lossscale", *command],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xb1" in done.stdout


DEMO, PLOT = ["demo", "--backend", "jax"], ["plot", "run.jsonl", "-o", "run.png"]


@pytest.mark.parametrize(
    ("arguments", "absent", "command"),
    [
        (DEMO, {"rich"}, 'pip install "lossscale[demo]"'),
        (DEMO, {"sklearn", "matplotlib"}, 'pip install "lossscale[demo]"'),
        (DEMO, {"jax"}, 'pip install "lossscale[jax]"'),
        (DEMO, {"keras", "jax"}, 'pip install "lossscale[keras,jax]"'),
        (PLOT, {"matplotlib"}, 'pip install "lossscale[plots]"'),
        (["migrate", "model.h5"], {"rich"}, 'pip install "lossscale[demo]"'),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_missing_packages_give_one_line_with_the_command(
    arguments, absent, command, monkeypatch, capsys
):
    # It may be imported with another backend.
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.endswith(f"not found: {command}\n")
    assert err.count("\n") == 1
    for module in absent:
        assert {"sklearn": "scikit-learn"}.get(module, module) in err


class FakeKeras:
    class backend:  # noqa: N801
        @staticmethod
        def backend():
            return "torch"


def test_keras_with_another_backend_is_an_error(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "keras", FakeKeras)
    assert "already imported with the backend torch" in refused("demo", "--backend", "jax")


def test_the_default_backend(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setitem(sys.modules, "keras", FakeKeras)
    assert arguments.choose_backend(None) == "torch"
    monkeypatch.delitem(sys.modules, "keras")
    assert arguments.choose_backend(None) == "jax"
    assert arguments.choose_backend("torch") == "torch"
    monkeypatch.delenv("KERAS_BACKEND")
    assert arguments.choose_backend(None) == "tensorflow"
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    with pytest.raises(Exception, match="not 'theano'"):
        arguments.choose_backend(None)


def test_silenced_drops_what_compiled_code_writes_and_gives_it_back(capfd):
    with consoles.silenced():
        os.write(2, b"hidden\n")
    with pytest.raises(ZeroDivisionError), consoles.silenced():
        raise ZeroDivisionError
    os.write(2, b"shown\n")
    assert capfd.readouterr().err == "shown\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "lossscale" in capsys.readouterr().out


FRAMEWORKS = {"numpy", "tensorflow", "keras", "tf_keras", "jax", "torch", "optax"}


@pytest.mark.parametrize(
    ("program", "heavy", "start"),
    [
        ("main.build_parser().format_help()", {"matplotlib", "rich", "sklearn"}, ""),
        ("main.main(['info'])", set(), f"lossscale {lossscale.__version__}\nPython "),
    ],
    ids=["help", "info"],
)
def test_nothing_heavy_is_imported(program, heavy, start):
    code = f"import sys\nfrom lossscale.cli import main\n{program}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not (FRAMEWORKS | heavy) & set(done.stdout.splitlines()[-1].split())
    assert done.stdout.startswith(start)


def test_python_m_lossscale_is_the_command():
    command = [sys.executable, "-m", "lossscale", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"lossscale {lossscale.__version__}\n"


# --- Narrow terminals, NO_COLOR, and readers that go away -----------------------------------------

SIMULATE = ["simulate", "--overflow-probability", "0.001", "--steps", "300", "--runs", "2"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def numbers(text):
    """The numbers in a table, whatever the widths of its columns."""
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return sorted(re.findall(r"[-+]?\d+(?:\.\d+|\*\*\d+)?%?", " ".join(rows)))


def test_a_narrow_terminal_shows_all_numbers(monkeypatch, capsys):
    shown = []
    for columns in ("200", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(SIMULATE) == 0
        shown.append(capsys.readouterr().out)
    wide, narrow = shown
    assert numbers(narrow) == numbers(wide) != []
    table = [line for line in narrow.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 40


def test_the_table_of_the_demo_in_a_narrow_terminal(monkeypatch):
    run = Run(RECIPES[3], [0.9], [0.01], [8.0, 4.0], [True, False], 4.0, 2.5)
    shown = []
    for columns in ("100", "50"):
        monkeypatch.setenv("COLUMNS", columns)
        print_table(consoles.new_console(file := io.StringIO()), [run])
        shown.append(file.getvalue())
    assert {"90.0%", "1.00%", "2.5"} <= set(numbers(shown[0]))
    assert numbers(shown[1]) == numbers(shown[0])


@pytest.mark.parametrize("value", ["1", "no"])
def test_no_color_writes_no_escape_sequence(value, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = []
    for _ in range(2):
        console = consoles.new_console(file := Terminal())
        console.print("[bold red]words[/bold red]")
        with console.status("waiting"):
            pass
        written.append(file.getvalue())
        monkeypatch.setenv("NO_COLOR", value)
    coloured, plain = written
    assert "\x1b" in coloured
    assert "words" in plain
    assert "\x1b" not in plain


@pytest.mark.parametrize(
    "arguments", [["--help"], ["simulate", "--help"], [*SIMULATE, "--json"], SIMULATE]
)
def test_a_reader_that_goes_away_ends_it_quietly(arguments, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        if arguments is not SIMULATE:
            assert main(arguments) == 1
        else:  # rich ends the program where it writes a table.
            with pytest.raises(SystemExit) as caught:
                main(arguments)
            assert caught.value.code == 1
    assert capsys.readouterr().err == ""

"""Narrow terminals, NO_COLOR, and readers that go away."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest

from lossscale.cli import console as consoles
from lossscale.cli.main import main
from lossscale.demo.experiment import RECIPES, Run
from lossscale.demo.table import print_table

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

"""Where there cannot be a simulated CUDA device, its part of the tests is left out, in words."""

import importlib.metadata
import pathlib
import sys

import pytest

import run
from simulated_cuda import device


@pytest.fixture
def _nothing_else(monkeypatch):
    monkeypatch.setattr(run, "ALL", {run.ON_SIMULATED_CUDA: run.ALL[run.ON_SIMULATED_CUDA]})
    monkeypatch.setattr(sys, "argv", ["run.py", "--jobs", "1"])
    monkeypatch.delenv(run.DEMAND, raising=False)


def without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)


def with_another_release(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.0")


@pytest.mark.usefixtures("_nothing_else")
@pytest.mark.parametrize(
    ("absent", "why"),
    [(without_a_compiler, "needs a C++ compiler"), (with_another_release, "not 2.4.0")],
)
def test_the_part_is_left_out_in_the_last_line_and_demanded_by_ci(absent, why, monkeypatch, capsys):
    absent(monkeypatch)
    assert run.main() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"left out: {run.ON_SIMULATED_CUDA}, because ")
    assert why in last
    monkeypatch.setenv(run.DEMAND, "1")
    assert run.main() == 1


def test_ci_demands_it():
    ci = pathlib.Path(run.ROOT, ".ci", "run").read_text(encoding="utf-8")
    assert f"export {run.DEMAND}=1" in ci


def test_the_list_of_what_the_device_cannot_do_is_short_and_true():
    assert len(device.CANNOT) <= 10
    tests = "".join(
        path.read_text(encoding="utf-8")
        for each in run.SIMULATED
        for path in sorted(
            pathlib.Path(run.ROOT).glob(each + ("" if each[-3:] == ".py" else "/*.py"))
        )
    )
    assert [name for name in device.CANNOT if f"def {name}(" not in tests] == []

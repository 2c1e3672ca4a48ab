"""A part of the tests that cannot run on this machine is left out, in words."""

import os
import sys

import pytest

import run
from benchmarks import xla_gpu


@pytest.mark.parametrize(
    ("part", "why"),
    [(run.ON_SIMULATED_CUDA, "needs a C++ compiler"), (run.WITH_XLA_GPU, "is missing")],
)
def test_it_is_named_in_the_last_line_and_demanded_by_ci(part, why, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "ALL", {part: run.ALL[part]})
    monkeypatch.setattr(sys, "argv", ["run.py", "--jobs", "1"])
    monkeypatch.delenv(run.DEMAND, raising=False)
    # Neither a compiler nor the wheels.
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(xla_gpu, "FOLDER", tmp_path)
    assert run.main() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"left out: {part}, because ")
    assert why in last
    monkeypatch.setenv(run.DEMAND, "1")
    assert run.main() == 1

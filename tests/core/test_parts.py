"""A part of the tests that cannot run on this machine is left out, in words."""

import os
import pathlib
import sys

import pytest

import run
from benchmarks import xla_gpu
from simulated_cuda import device


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


def test_the_list_of_what_the_device_cannot_do_is_short_and_true():
    assert len(device.CANNOT) <= 10
    tests = "".join(
        path.read_text(encoding="utf-8")
        for each in run.SIMULATED
        for path in sorted(
            pathlib.Path(run.ROOT).glob(each + ("" if each[-3:] == ".py" else "/*.py"))
        )
    )
    names = {name.partition("[")[0] for name in device.CANNOT}
    assert [name for name in names if f"def {name}(" not in tests] == []

"""A part of the tests that cannot run on this machine is left out, in words."""

import importlib.metadata
import os
import pathlib
import sys

import pytest

import run
from benchmarks import xla_gpu
from simulated_cuda import device


def without_a_compiler(monkeypatch, folder):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)


def with_another_release(monkeypatch, folder):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.0")


def without_the_wheels(monkeypatch, folder):
    monkeypatch.setattr(xla_gpu, "FOLDER", folder)


def with_wheels_of_another_release(monkeypatch, folder):
    monkeypatch.setattr(xla_gpu, "FOLDER", folder)
    about = folder / "jax_cuda12_pjrt-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: jax-cuda12-pjrt\nVersion: 0.1.0\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("part", "absent", "why"),
    [
        (run.ON_SIMULATED_CUDA, without_a_compiler, "needs a C++ compiler"),
        (run.ON_SIMULATED_CUDA, with_another_release, "not 2.4.0"),
        (run.WITH_XLA_GPU, without_the_wheels, "is missing"),
        (run.WITH_XLA_GPU, with_wheels_of_another_release, "is 0.1.0"),
    ],
)
def test_it_is_named_in_the_last_line_and_demanded_by_ci(
    part, absent, why, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "ALL", {part: run.ALL[part]})
    monkeypatch.setattr(sys, "argv", ["run.py", "--jobs", "1"])
    monkeypatch.delenv(run.DEMAND, raising=False)
    absent(monkeypatch, tmp_path)
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
    assert [name for name in device.CANNOT if f"def {name}(" not in tests] == []

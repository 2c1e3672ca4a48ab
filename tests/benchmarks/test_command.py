"""`python -m benchmarks`: its arguments, and its short form on every backend."""

import json
import os
import pathlib

import pytest

from benchmarks.__main__ import main
from benchmarks.rows import ALL_MODES, Process

REPOSITORY = pathlib.Path(__file__).parents[2]
UNOPTIMIZED = "--xla_backend_optimization_level=0"

# Each program of each backend, which checks its work before it is timed. Networks, inner optimizers
# and monitors are the same on all of Keras 3, and take PyTorch the least time. Both Kerases have
# one program of a whole step on TensorFlow, and one of an optimizer alone. Whole steps of Optax
# take half a minute to compile, and run in `make bench` alone.
PROGRAMS = {
    "tensorflow": ["sparse", "big"],
    "tf_keras": ["mlp"],
    "jax": ["big", "mlp"],
    "torch": ["big", "optimizers", "mlp", "cnn", "skip", "monitor"],
    "optax": ["alone"],
    "torch_native": ["alone", "backward", "whole"],
}
# Other modes are those of Keras 3.
MODES_TO_RUN = {"tf_keras": ["function"]}
# What runs without Keras, and what it needs.
WITHOUT_KERAS = {"optax": "jax", "torch_native": "torch"}
# Each process of tests/run.py runs the programs of its own backend.
BACKEND = os.environ.get("LOSSSCALE_TEST_KERAS") or os.environ["KERAS_BACKEND"]
BACKENDS = [BACKEND, *(name for name, framework in WITHOUT_KERAS.items() if framework == BACKEND)]


def test_what_leaves_nothing_to_run_is_an_error(capsys):
    assert main(["--backend", "jax", "--case", "sparse"]) == 2
    assert "nothing runs with jax, sparse, function" in capsys.readouterr().err


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_short_form_runs_every_program(backend, tmp_path, monkeypatch, capfd):
    output, cases = tmp_path / "folder" / "results.json", PROGRAMS[backend]
    modes = MODES_TO_RUN.get(backend, list(ALL_MODES))
    arguments = ["--quick", "--rounds", "2", "--backend", backend, "--case", *cases]
    arguments += ["--mode", *modes, "--output", str(output)]
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    # Compiled code that runs twice need not be fast.
    monkeypatch.setenv("XLA_FLAGS", UNOPTIMIZED)
    monkeypatch.chdir(REPOSITORY)
    status, (printed, errors) = main(arguments), capfd.readouterr()
    assert status == 0, errors
    results = json.loads(output.read_text())
    asked = {"backend": [backend], "case": cases, "mode": modes}
    asked |= {"rounds": 2, "device": "", "quick": True}
    assert (results["options"], results["wrong"]) == (asked, [])
    assert set(results) >= {"date", "machine", "versions", "rows", "not_run"}
    expected = Process(backend, cases, modes, quick=True).rows()
    assert {row.case for row in expected} == set(cases)
    for row, found in zip(expected, results["rows"], strict=True):
        for field in ("case", "wrapper", "mode", "point", "optimizer", "device"):
            assert found[field] == getattr(row, field)
        assert tuple(found["methods"]) == row.methods
        check_times(row, found)
        assert row.point in printed
        assert row.wrapper.removeprefix("keras-") in printed or backend in WITHOUT_KERAS
    if backend in ("jax", "torch") and not results["machine"]["gpus"]:
        assert f"Not run: {backend} on a GPU, because there is no GPU" in printed


def check_times(row, found):
    assert found["rounds"] == 2
    for name, method in found["methods"].items():
        if "does_not_run" in method:
            assert (name, row.case) == ("peer_fixed", "sparse")
            continue
        for field in ("seconds", "ratio", *["ratio_to_applied"] * name.endswith("/skipped")):
            assert 0 < method[field]["q1"] <= method[field]["median"] <= method[field]["q3"] < 1e9
        if name in (row.methods[0], "bare, clip"):
            assert method["ratio"]["median"] == 1.0
        assert ("memory_bytes" in method) == row.structure

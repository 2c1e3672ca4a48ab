"""`python -m benchmarks`: its arguments, and its short form on every backend."""

import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import types

import pytest

import benchmarks.__main__
from benchmarks.__main__ import main
from benchmarks.methods import METHODS
from benchmarks.plan import ALL_MODES, MODES, processes
from fresh import Program

REPOSITORY = pathlib.Path(__file__).parents[2]
UNOPTIMIZED = "--xla_backend_optimization_level=0"

# Each program of each backend. What only has other sizes is built in test_workloads.py; networks
# and inner optimizers are the same on all of Keras 3, and take PyTorch the least time. What comes
# first is run once more, to warm up.
PROGRAMS = {
    "tensorflow": ["sparse", "big", "mlp", "replicas", "collectives"],
    "tf_keras": ["mlp", "big"],
    "jax": ["big", "mlp", "collectives"],
    "torch": ["big", "optimizers", "mlp", "cnn", "skip", "host_syncs"],
}
# XLA compiles the steps of both Kerases in the same way.
MODES_TO_RUN = {**MODES, "tf_keras": ("function", "eager")}
# Each process of tests/run.py runs the programs of its own backend.
BACKEND = os.environ.get("LOSSSCALE_TEST_KERAS") or os.environ["KERAS_BACKEND"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "mxnet"], "there is no backend 'mxnet'; there are tensorflow, tf_keras"),
        (["--case", "big,huge"], "there is no case 'huge'; there are big, small"),
        (["--mode", "warp"], "there is no mode 'warp'; there are function, xla"),
        (["--rounds", "0"], "must be a whole number from 1 up, not '0'"),
        (["--rounds", "few"], "must be a whole number from 1 up, not 'few'"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_a_wrong_argument_ends_it_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    "arguments",
    [["--backend", "jax", "--case", "sparse"], ["--backend", "torch", "--mode", "xla"]],
)
def test_so_do_arguments_that_leave_nothing_to_do(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nothing runs with" in error


def check_quartiles(found):
    assert set(found) == {"median", "q1", "q3"}
    assert all(math.isfinite(number) and number > 0 for number in found.values())
    assert found["q1"] <= found["median"] <= found["q3"]


WORKER = """
import sys
from benchmarks import worker

sys.exit(worker.main(sys.argv[1:]))
"""


def by_forks(monkeypatch):
    """Lets workers be forks of a process that has imported the framework already."""
    one_at_a_time = threading.Lock()

    def run(command, *, env, check):
        assert (command[:3], check) == ([sys.executable, "-m", "benchmarks.worker"], False)
        with one_at_a_time:
            done = Program(WORKER, *command[3:], environment=env).finished()
        print(done.stderr, file=sys.stderr)
        return done

    monkeypatch.setattr(benchmarks.__main__, "subprocess", types.SimpleNamespace(run=run))


def run_the_command(arguments):
    """Runs it as its users do: the processes that it starts are what the forks stand for."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_short_form_runs_every_program(tmp_path, monkeypatch, capfd):
    output, backend, cases = tmp_path / "folder" / "results.json", BACKEND, PROGRAMS[BACKEND]
    modes = MODES_TO_RUN[backend]
    arguments = ["--quick", "--rounds", "2", "--backend", backend]
    arguments += [] if modes == MODES[backend] else ["--mode", ",".join(modes)]
    arguments += ["--case", ",".join(cases), "--output", str(output)]
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    # Compiled code that runs twice need not be fast.
    monkeypatch.setenv("XLA_FLAGS", UNOPTIMIZED)
    if backend == "tf_keras":
        status, printed, errors = run_the_command(arguments)
    else:
        by_forks(monkeypatch)
        status, (printed, errors) = main(arguments), capfd.readouterr()
    assert status == 0, errors
    results = json.loads(output.read_text())
    assert set(results) == {
        "date",
        "machine",
        "versions",
        "options",
        "measured_by",
        "rows",
        "collectives",
        "host_syncs",
        "not_run",
        "wrong",
    }
    assert results["wrong"] == []
    assert results["options"] == {
        "backends": [backend],
        "cases": cases,
        "modes": list(ALL_MODES if modes == MODES[backend] else modes),
        "rounds": 2,
        "quick": True,
    }
    assert set(results["machine"]) >= {"processor", "cores", "memory_bytes", "python", "gpus"}
    expected = {case for p in processes([backend], cases, modes, True) for case in p.cases}
    assert {row["case"] for row in results["rows"]} == expected - {"collectives", "host_syncs"}
    assert {row["mode"] for row in results["rows"]} == set(modes)
    for row in results["rows"]:
        check_row(row)
    check_counts(backend, results)
    for row in results["rows"]:
        assert row["shell"] in printed
    if backend in ("jax", "torch") and not results["machine"]["gpus"]:
        assert f"Not run: {backend} on a GPU, because there is no GPU" in printed


def check_row(row):
    assert row["rounds"] == 2
    assert row["steps_per_round"] >= 1
    assert "bare" in row["methods"]
    for name, method in row["methods"].items():
        assert name.removesuffix("/skipped") in METHODS
        if "does_not_run" in method:
            assert (name, row["case"]) == ("peer_fixed", "sparse")
            continue
        assert method["first_step_seconds"] > 0
        check_quartiles(method["seconds"])
        check_quartiles(method["ratio"])
        if name.endswith("/skipped"):
            check_quartiles(method["ratio_to_applied"])
        if row["case"] in ("big", "small"):
            assert method["memory_bytes"] is None or method["memory_bytes"] >= 0
            assert ("graph_size" in method) == (row["mode"] != "eager" or "torch" in row["shell"])


def check_counts(backend, results):
    if backend == "torch":
        (found,) = results["host_syncs"]
        assert found["method"] == "ours_dynamic"
        # The verdict is read once, by the optimizer.
        assert found["apply_host_syncs"] == found["train_host_syncs"] == 1
        assert min(found["apply_graphs"], found["apply_graph_breaks"]) >= 1
    if backend in ("tensorflow", "jax"):
        assert results["collectives"]
        for one in results["collectives"]:
            # The gradients of 10 variables of 1,000 float32 numbers, and perhaps a verdict.
            assert one["sums"] >= 1
            assert 40_000 <= one["bytes"] < 41_000

"""These tests need PyTorch alone: a process that runs no others never imports Keras."""

import contextlib
import importlib
import json
import pkgutil
import sys

import pytest

import lossscale.torch
from forks import Program

_PREFIX = f"{lossscale.torch.__name__}."


@pytest.fixture(scope="session", autouse=True)
def _no_keras():
    # Other folders of the same process may have imported it before.
    before = {name for name in ("keras", "tf_keras", "tensorflow") if name in sys.modules}
    yield
    for module in pkgutil.walk_packages(lossscale.torch.__path__, _PREFIX):
        # Lightning and others are not there where the lowest releases are tried.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module.name)
    now = {name for name in ("keras", "tf_keras", "tensorflow") if name in sys.modules}
    assert now == before


@pytest.fixture(autouse=True)
def _new_accelerate():
    """Accelerate, which Hugging Face's Trainer uses too, keeps its state in classes."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(scope="session")
def lightning():
    return pytest.importorskip("lightning")


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """What each process of each set found in each case, by the size of the set."""
    # The lowest release, on which other tests of this folder run, lacks what these cases use.
    from frameworks.torch import cases_of_processes as cases

    run = f"import sys; from {cases.__name__} import main; main(*sys.argv[1:])"
    folder, sets = tmp_path_factory.mktemp("processes"), {}
    for size in cases.CASES:
        programs = [
            Program(run, number, size, folder, module=cases.__name__) for number in range(size)
        ]
        for program in programs:
            done = program.finished()
            assert done.returncode == 0, done.stderr[-3000:]
        sets[size] = [json.loads((folder / f"{size}-{n}.json").read_text()) for n in range(size)]
    return sets

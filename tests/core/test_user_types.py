"""What pyright says of users' programs: no error, and the types that it reveals.

The programs are those of `tests/core/annotated`. A line `reveal_type(x)  # X` says what it reveals.
basedpyright is pyright, with the Node.js that it needs.
"""

import functools
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tests/core/annotated"
PROGRAMS = sorted(FOLDER.glob("*.py"))

MISTAKES = """\
import torch

import lossscale
import lossscale.torch

inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
optimizer = lossscale.torch.LossScaleOptimizer(inner)
torch.optim.lr_scheduler.ExponentialLR(5, 0.5)
optimizer.backward("loss")
optimizer.step(3)
lossscale.torch.LossScaleOptimizer(inner, decide="both")
lossscale.LossScaleOptimizer(inner, decide="both")
lossscale.LossScaleOptimizer("adam")
lossscale.LossScaleOptimizer(inner, initial_scal=8)
lossscale.torch.GradScaler().step("adam")
lossscale.DynamicScale(initial_scale="high")
lossscale.LossScaleOptimizer(inner).backward(los=None)
lossscale.LossScaleOptimizer()
lossscale.torch.Monitor(optimizer, every="all")
lossscale.DynamicScale(growth=3)
lossscale.optax.loss_scalled
lossscale.keras.Monitor
lossscale.tf_keras.Monitor
lossscale.experimental.Policy
lossscale.torch.guard("model", optimizer)
"""
FIRST_MISTAKE = 8

# What is installed where pyright checks programs, beside this library: the PyTorch user has no
# Keras, and the user of Keras on JAX has neither PyTorch nor TensorFlow.
INSTALLED = {
    "torch": ("torch", ("with_torch", "with_grad_scaler")),
    "jax": ("keras jax jaxlib ml_dtypes numpy optax flax", ("with_keras", "with_optax")),
    "tf_keras": ("tf_keras numpy", ("with_tf_keras",)),
}


def place_of(file):
    """Where a package is installed: its folder, or its only file."""
    return file.parent if file.name == "__init__.py" else file


@functools.cache
def found():
    """What pyright finds in the programs, each checked where links say what is installed."""
    with tempfile.TemporaryDirectory(prefix="lossscale-types-") as name:
        folder = pathlib.Path(name)
        for place, (packages, programs) in INSTALLED.items():
            site = folder / place / "site"
            site.mkdir(parents=True)
            for program in programs:
                shutil.copy(FOLDER / f"{program}.py", site.parent)
            site.joinpath("lossscale").symlink_to(ROOT / "src/lossscale")
            for package in (*packages.split(), "typing_extensions"):
                source = place_of(pathlib.Path(importlib.util.find_spec(package).origin))
                site.joinpath(source.name).symlink_to(source)
        folder.joinpath("torch/mistakes.py").write_text(MISTAKES)
        # Otherwise pyright finds the packages of the Python that runs it.
        folder.joinpath("empty/lib/python3.11/site-packages").mkdir(parents=True)
        settings = {
            "typeCheckingMode": "standard",
            "pythonVersion": "3.11",
            "venvPath": name,
            "venv": "empty",
            "include": [f"{place}/*.py" for place in INSTALLED],
            "executionEnvironments": [
                {"root": place, "extraPaths": [f"{place}/site"]} for place in INSTALLED
            ],
        }
        folder.joinpath("pyrightconfig.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "basedpyright", "--project", name, "--outputjson"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return json.loads(done.stdout)["generalDiagnostics"]


def said_of(program):
    """What pyright says of a program: (line, type or message)."""
    for each in found():
        if pathlib.Path(each["file"]).stem == program:
            number = each["range"]["start"]["line"] + 1
            revealed = re.fullmatch(r'Type of ".*" is "(.*)"', each["message"])
            yield number, revealed[1] if revealed else each["message"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_users_program_has_the_types_that_it_says(program):
    expected = {}
    for number, line in enumerate(program.read_text(encoding="utf-8").splitlines(), 1):
        if said := re.fullmatch(r" *reveal_type\(.*\)  # (.*)", line):
            expected[number] = said[1]
    assert len(expected) > 1
    assert dict(said_of(program.stem)) == expected


def test_a_type_checker_finds_mistakes():
    wrong = {*range(FIRST_MISTAKE, MISTAKES.count("\n") + 1)}
    assert {number for number, _ in said_of("mistakes")} == wrong

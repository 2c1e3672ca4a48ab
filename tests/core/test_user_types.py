"""What type checkers say of users' programs: no error, and the types that they reveal.

The programs are those of `tests/core/annotated`. A line `reveal_type(x)  # X` says what both
type checkers reveal, without the modules of the names; after `mypy: `, what mypy reveals, for which
all that Keras has is Any. basedpyright is pyright, with the Node.js that it needs.
"""

import functools
import importlib.util
import json
import os
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

# Of the thousands of files of PyTorch and JAX, those that say what the types of the programs are.
MYPY = f"""\
[mypy]
strict = true
disallow_subclassing_any = false
disallow_untyped_calls = false
follow_imports = silent
cache_dir = {os.devnull}
[mypy-keras.*,tf_keras.*,optax.*]
ignore_missing_imports = true
[mypy-torch.*,jax.*,flax.*,numpy.*,tensorflow.*,jaxlib.*,ml_dtypes.*,sympy.*]
follow_imports = skip
[mypy-torch,torch._tensor,torch.types,torch.optim.*,torch.amp.*]
follow_imports = silent
[mypy-jax,jax._src.api,jax._src.basearray,jax._src.pjit,jax._src.typing,jax.typing]
follow_imports = silent
"""


def started(module, *arguments, **environment):
    """A type checker that runs."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    given = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=given)


def place_of(file):
    """Where a package is installed: its folder, or its only file."""
    return file.parent if file.name == "__init__.py" else file


@functools.cache
def runs():
    """The two type checkers, at the same time; pyright checks programs where links say."""
    with tempfile.TemporaryDirectory(prefix="lossscale-types-") as name:
        folder = pathlib.Path(name)
        for place, (packages, programs) in INSTALLED.items():
            site = folder / place / "site"
            site.mkdir(parents=True)
            for program in programs:
                shutil.copy(FOLDER / f"{program}.py", site.parent)
            site.joinpath("lossscale").symlink_to(ROOT / "src/lossscale")
            for package in (*packages.split(), "typing_extensions"):
                found = place_of(pathlib.Path(importlib.util.find_spec(package).origin))
                site.joinpath(found.name).symlink_to(found)
        mistakes = folder / "torch/mistakes.py"
        mistakes.write_text(MISTAKES)
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
        folder.joinpath("mypy.ini").write_text(MYPY)
        pyright = started("basedpyright", "--project", folder, "--outputjson")
        mypy = started(
            *("mypy", "--config-file", folder / "mypy.ini", *PROGRAMS, mistakes),
            MYPYPATH=str(ROOT / "src"),
        )
        return json.loads(pyright.communicate()[0]), mypy.communicate()[0]


def without_modules(said):
    """A type as a user would write it."""
    said = re.sub(r"tuple\[[^][]*?, fallback=([\w.]+)\]", r"\1", said)
    said = re.sub(r"tuple\[.*?, fallback=([\w.]+)\]", r"\1", said)
    said = said.replace("'] | Literal['", "', '")
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", said)


def by_pyright(program):
    """What pyright says of a program, wherever it is checked: (line, type or message)."""
    found, _ = runs()
    for each in found["generalDiagnostics"]:
        if pathlib.Path(each["file"]).stem == program:
            number = each["range"]["start"]["line"] + 1
            revealed = re.fullmatch(r'Type of ".*" is "(.*)"', each["message"])
            yield number, revealed[1] if revealed else each["message"]


def by_mypy(program):
    """What mypy says of a program: (line, type or message)."""
    _, found = runs()
    for number, message in re.findall(rf"/{program}.py:(\d+): (.*)", found):
        revealed = re.fullmatch(r'note: Revealed type is "(.*)"', message)
        yield int(number), without_modules(revealed[1]) if revealed else message


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_users_program_has_the_types_that_it_says(program):
    pyright, mypy = {}, {}
    for number, line in enumerate(program.read_text(encoding="utf-8").splitlines(), 1):
        if said := re.fullmatch(r" *reveal_type\(.*\)  # (.*?)(?:, mypy: (.*))?", line):
            pyright[number], mypy[number] = said[1], said[2] or said[1]
    assert len(pyright) > 1
    assert dict(by_pyright(program.stem)) == pyright
    assert dict(by_mypy(program.stem)) == mypy


def test_a_type_checker_finds_mistakes():
    wrong = {*range(FIRST_MISTAKE, MISTAKES.count("\n") + 1)}
    assert {number for number, _ in by_pyright("mistakes")} == wrong
    # mypy is not shown the file of `torch.nn.Module`, which might be any class.
    assert {number for number, _ in by_mypy("mistakes")} == wrong - {max(wrong)}

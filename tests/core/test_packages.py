"""What is not installed is named, with a command that installs it: every command, every package."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from lossscale.packages import EXTRAS as EXTRA_OF
from tools import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def installed_by(extra):
    """The distributions that an extra of this project names, and what these need themselves."""
    found = set()
    for requirement in EXTRAS[extra]:
        name, others = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if name == "lossscale":
            found = found.union(*(installed_by(other) for other in others.split(",")))
        else:
            found |= {name, *direct_requirements(name)}
    return found


def direct_requirements(name):
    lines = metadata.requires(name) or ()
    return {re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line}


@pytest.mark.parametrize("module", EXTRA_OF)
def test_the_extra_of_a_package_installs_it(module):
    assert module in installed_by(EXTRA_OF[module])


# What asks for a package, and the extra that has it.
ASKED = {
    "lossscale.install()": "tensorflow",
    "lossscale.LossScaleOptimizer.from_config(config)": "tensorflow",
    "LossScaleMonitor()": "tensorflow",
    "importlib.import_module('lossscale.optax')": "jax,optax",
    "importlib.import_module('lossscale.keras')": "tensorflow",
    "importlib.import_module('lossscale.tf_keras')": "tf-keras,tensorflow",
    "importlib.import_module('lossscale.experimental.tf_keras')": "tf-keras,tensorflow",
    "lossscale.torch.GradScaler": "torch",
    "lossscale.torch.Monitor": "diagnosis",
}
BARE = """
import sys
absent, asked = %r
sys.modules |= dict.fromkeys(absent)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in absent else found(name)
import importlib
import lossscale, lossscale.torch
from lossscale.callbacks import LossScaleMonitor
config = {"inner_optimizer": {"class_name": "SGD", "config": {}}}
for ask in asked:
    try:
        eval(ask)
        print("nothing was missing")
    except Exception as error:
        print(type(error).__name__, "|", error)
"""


def check_asked(program, asked, error):
    """Checks that each thing asked for is an error that names its extra, without frameworks."""
    done = subprocess.run(
        # Nothing can be imported without them in this process, where they are loaded.
        [sys.executable, "-c", program % ((set(EXTRA_OF), list(asked)),)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.partition(" | ")[0] for line in lines} == {error}, done.stdout
    # The extras of the command at the end of a message.
    extras = re.findall(r'pip install "lossscale\[([\w,-]+)\]"', done.stdout)
    assert extras == [*asked.values()]


def test_the_library_alone_names_what_each_of_its_parts_needs():
    check_asked(BARE, ASKED, "MissingPackageError")


# Attributes that import a framework.
ATTRIBUTES = {
    "lossscale.keras": "tensorflow",
    "lossscale.optax": "jax,optax",
    "lossscale.tf_keras": "tf-keras,tensorflow",
    "lossscale.experimental.keras": "tensorflow",
}
READING = """
import inspect
for module in (lossscale, lossscale.experimental):
    inspect.getmembers(module)
    for name in dir(module):
        getattr(module, name, None)
for ask in asked:
    module, _, name = ask.rpartition(".")
    assert not hasattr(eval(module), name)
"""


def test_an_attribute_that_needs_a_missing_package_is_none_that_hasattr_finds():
    program = BARE.replace("for ask in asked:\n", READING + "for ask in asked:\n", 1)
    check_asked(program, ATTRIBUTES, "AttributeError")


def test_what_old_releases_cannot_do_are_tests():
    """Pytest leaves out what it does not find, and says nothing."""
    for node in (node for nodes in versions.IMPOSSIBLE.values() for node in nodes):
        path, name = node.split("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")

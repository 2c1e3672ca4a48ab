"""What importing the library costs, and which of its modules may import which."""

import json
import os
import subprocess
import sys

import pytest

from core.source_tree import FRAMEWORKS, Module, imports, modules

HEAVY = {*FRAMEWORKS, "numpy", "matplotlib", "rich", "sklearn", "h5py", "ml_dtypes"}
SHELLS = {
    "keras": {"keras"},
    "tf_keras": {"tf_keras", "tensorflow"},
    "torch": {"torch"},
    "optax": {"optax", "jax"},
}
"""For each shell, the frameworks that any module of it may import."""

KERAS_BACKENDS = {"tensorflow", "jax", "torch"}
"""What only a module of `frameworks.keras` or `frameworks.histograms` with that name may import."""

BY_FRAMEWORK = (
    "lossscale.frameworks.histograms",
    "lossscale.frameworks.finite",
    "lossscale.frameworks.watches",
)
"""Packages with one module for each of these frameworks, without Keras."""

CORE = {"errors", "rules"}
MIDDLE = {*CORE, "arguments", "registry"}
FRONT = {*MIDDLE, "optimizer"}
MAY_IMPORT = {
    "errors": set(),
    "rules": {"errors"},
    "arguments": CORE,
    "registry": {*CORE, "arguments"},
    "optimizer": MIDDLE,
    "frameworks": {*FRONT, "diagnostics", "callbacks"},
    "experimental": {*FRONT, "frameworks"},
    "migration": {*FRONT, "frameworks"},
    "installation": {*FRONT, "frameworks", "experimental", "migration"},
    # `lossscale` itself.
    "": {*FRONT, "installation"},
    "callbacks": {*MIDDLE, "diagnostics"},
    "diagnostics": CORE,
    "plots": {*CORE, "diagnostics"},
    "demo": {*FRONT, "diagnostics", "plots"},
    # Nothing imports the command line, so it may use whatever it shows.
    "cli": {*FRONT, "frameworks", "experimental", "migration", "diagnostics", "plots", "demo", ""},
    "__main__": {"cli"},
}
"""For each part of the library, the parts that it may import besides itself."""

MAY_USE_A_FRAMEWORK_INSIDE_A_FUNCTION = {
    "cli",
    "demo",
    "diagnostics",
    "experimental",
    "migration",
}


def in_a_fresh_interpreter(statement):
    """The modules that a statement imports, and the CPU time it takes, in seconds."""
    program = f"""
import json, sys, time
before = set(sys.modules)
start = time.process_time()
{statement}
seconds = time.process_time() - start
print(json.dumps([sorted(set(sys.modules) - before), seconds]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names, seconds = json.loads(done.stdout)
    return {name.partition(".")[0] for name in names}, seconds


def violations(module):
    """Returns what is wrong with the imports of a module, as sentences."""
    if module.part not in MAY_IMPORT:
        return [f"{module.name}: give `{module.part}` a place in MAY_IMPORT"]
    found = []
    for imported in imports(module):
        if imported.root == "lossscale":
            target = own_part(imported.name)
            if target not in {*MAY_IMPORT[module.part], module.part}:
                found.append(f"{module.name} imports {imported.name}")
            elif module.part == "frameworks" and shell_of(imported.name) not in {
                None,
                shell_of(module.name),
            }:
                found.append(f"{module.name} imports another shell, {imported.name}")
        elif module.part == "frameworks":
            if imported.root in FRAMEWORKS - frameworks_for(module.name):
                found.append(f"{module.name} imports {imported.root}")
        elif imported.root in FRAMEWORKS and not (
            imported.lazy and module.part in MAY_USE_A_FRAMEWORK_INSIDE_A_FUNCTION
        ):
            found.append(f"{module.name} imports {imported.root}")
        elif imported.root in {"matplotlib", "rich", "sklearn"} and not imported.lazy:
            found.append(f"{module.name} imports {imported.root} outside a function")
    return found


def own_part(name):
    """The part that a dotted name below `lossscale` belongs to; a public name is of ""."""
    part = (*name.split("."), "")[1]
    return part if part in {*MAY_IMPORT, *(module.part for module in modules())} else ""


def shell_of(name):
    """Which of the shells a dotted name below `lossscale.frameworks` belongs to, or None."""
    part = (*name.split("."), "", "")[2].lstrip("_")
    return part if part in SHELLS else None


def frameworks_for(name):
    """The frameworks that a module below `lossscale.frameworks` may import."""
    shell = shell_of(name)
    if name.startswith(BY_FRAMEWORK):
        return {name.rpartition(".")[2]} & KERAS_BACKENDS
    if shell is None:
        # What several shells share must not bring the framework of one to another.
        return {"tensorflow"} if name != "lossscale.frameworks" else set()
    first_word = name.rpartition(".")[2].partition("_")[0]
    backend = {first_word} & KERAS_BACKENDS if shell == "keras" else set()
    return SHELLS[shell] | backend


@pytest.mark.parametrize("name", ["lossscale", "lossscale.rules"])
def test_importing_brings_no_framework_and_no_optional_package(name):
    imported, _ = in_a_fresh_interpreter(f"import {name}")
    assert imported & HEAVY == set()
    assert "lossscale" in imported


@pytest.mark.parametrize("name", ["lossscale", "lossscale.rules"])
def test_importing_needs_the_standard_library_only(name):
    imported, _ = in_a_fresh_interpreter(f"import {name}")
    assert imported - sys.stdlib_module_names == {"lossscale"}


@pytest.mark.parametrize("name", ["lossscale", "lossscale.rules"])
def test_importing_takes_less_than_50_ms(name):
    # CPU time, and the best of three: the first one may have to compile, and others may be at
    # work on the same machine.
    assert min(in_a_fresh_interpreter(f"import {name}")[1] for _ in range(3)) < 0.050


FILES_LOAD = """
import lossscale
import json, keras
after = keras.saving.get_registered_object
names = ["lossscale>LossScaleOptimizer", "lossscale.experimental>LossScaleOptimizer"]
assert all(after(name) is not None for name in names), names
optimizer = keras.saving.deserialize_keras_object(json.loads(sys.argv[1]))
assert isinstance(optimizer, lossscale.LossScaleOptimizer), optimizer
assert keras.__spec__.loader.__class__.__name__ == "SourceFileLoader"
"""


def test_files_load_if_keras_is_imported_after_lossscale():
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    described = {
        "module": "lossscale.frameworks.keras.shell",
        "class_name": "KerasLossScaleOptimizer",
        "config": {"name": None, "inner_optimizer": sgd},
        "registered_name": "lossscale>LossScaleOptimizer",
    }
    program = f"import sys{FILES_LOAD}"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(described)],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_submodule_is_an_attribute_after_importing_the_library_alone():
    below = {m.part for m in modules() if m.name.count(".") == 1} - {"__main__"}
    assert {"callbacks", "experimental", "migration", "plots"} <= below
    program = f"""
import lossscale
assert "lossscale.callbacks" not in sys.modules
assert {below} <= set(dir(lossscale))
for name in {sorted(below)}:
    assert getattr(lossscale, name) is sys.modules["lossscale." + name], name
lossscale.callbacks.LossScaleMonitor, lossscale.diagnostics.diagnose
"""
    imported, _ = in_a_fresh_interpreter(program)
    assert imported & FRAMEWORKS == set()


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_point_one_way(module):
    assert violations(module) == []


def test_the_table_itself_points_one_way():
    rest = dict(MAY_IMPORT)
    while rest:
        lowest = [part for part, below in rest.items() if not below & set(rest)]
        assert lowest, f"these import each other: {sorted(rest)}"
        for part in lowest:
            del rest[part]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("rules", "import lossscale.optimizer"),
        ("rules", "from lossscale import registry"),
        ("rules", "from . import registry"),
        ("rules", "def f():\n    from .registry import shell_for"),
        ("rules", "import tensorflow as tf"),
        ("rules", "def f():\n    import torch"),
        ("rules", "from lossscale import LossScaleOptimizer"),
        ("arguments", "try:\n    from keras.src import backend\nexcept ImportError:\n    pass"),
        ("registry", "import lossscale.frameworks.keras"),
        ("registry", "import importlib\nimportlib.import_module('keras.optimizers')"),
        ("optimizer", "from lossscale.frameworks import keras"),
        ("optimizer", "class A:\n    import jax"),
        ("frameworks.keras", "from lossscale.frameworks import tf_keras"),
        ("frameworks.keras", "from lossscale.frameworks._tf_keras import shell"),
        ("frameworks.keras", "from .torch import shell"),
        ("frameworks.keras.shell", "def f():\n    from ..optax import shell"),
        ("frameworks.keras", "def f():\n    import tf_keras"),
        ("frameworks.tf_keras", "from keras import ops"),
        ("frameworks.keras.shell", "import tensorflow"),
        ("frameworks.keras.engines.jax", "import torch"),
        ("frameworks.slots", "import keras"),
        ("frameworks.names", "import lossscale"),
        ("frameworks.keras", "import lossscale.experimental"),
        ("frameworks", "import tensorflow"),
        ("frameworks.histograms", "import tensorflow"),
        ("frameworks.histograms.jax", "import tensorflow"),
        ("frameworks.histograms.keras", "import keras"),
        ("experimental.loss_scale", "import tensorflow"),
        ("experimental", "import lossscale.diagnostics"),
        ("experimental", "import lossscale"),
        ("optimizer", "from lossscale import installation"),
        ("migration.files", "from tensorflow import train"),
        ("diagnostics.verdict", "import torch"),
        ("diagnostics.verdict", "from lossscale.plots import histogram"),
        ("plots.histogram", "import matplotlib.pyplot as plt"),
        ("plots.histogram", "from lossscale.cli import main"),
        ("plots.histogram", "def f():\n    import keras"),
        ("plots.histogram", "from lossscale import optimizer"),
        ("cli.demo", "import keras"),
        ("demo.training", "import keras"),
        ("demo.table", "from lossscale.cli import main"),
        ("cli.demo", "from rich import table"),
        ("", "import lossscale.frameworks.keras"),
        ("", "from lossscale import diagnostics"),
        ("unheard_of", "import math"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(name, source):
    assert violations(Module(f"lossscale.{name}".rstrip("."), source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("rules", "import math\nfrom lossscale.errors import ArgumentError"),
        ("rules", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("registry", "import importlib\nimportlib.import_module(name)"),
        ("optimizer", "from lossscale import registry"),
        ("frameworks.keras", "import keras\nfrom lossscale.rules import ScaleRule"),
        ("frameworks.keras.engines.tensorflow", "import keras, tensorflow"),
        ("frameworks.keras.engines.torch", "import keras, torch"),
        ("frameworks.tf_keras", "import tensorflow, tf_keras"),
        ("frameworks.optax", "import jax, optax"),
        ("frameworks.keras", "from lossscale.frameworks import _accumulation"),
        ("frameworks.keras.shell", "from . import slots\nfrom .. import _accumulation"),
        ("frameworks._accumulation", "import tensorflow as tf"),
        ("frameworks.histograms.jax", "import jax\nimport lossscale.diagnostics.exponents"),
        ("experimental.loss_scale", "def f():\n    import tensorflow"),
        ("diagnostics.verdict", "import numpy\nfrom lossscale.rules import DynamicScale"),
        ("plots.histogram", "def f():\n    import matplotlib.pyplot\nimport lossscale.diagnostics"),
        ("cli.demo", "from lossscale import LossScaleOptimizer\ndef f():\n    import keras"),
        ("", "from lossscale.rules import DynamicScale\nfrom lossscale import optimizer"),
    ],
)
def test_an_import_that_points_the_right_way_is_let_pass(name, source):
    assert violations(Module(f"lossscale.{name}".rstrip("."), source)) == []

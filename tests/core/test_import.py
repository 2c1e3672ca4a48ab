"""What importing the library costs, and which of its modules may import which."""

import json
import os
import subprocess
import sys

import pytest

from core.source_tree import FRAMEWORKS, Module, imports, modules, modules_named
from lossscale import packages

HEAVY = {*FRAMEWORKS, "numpy", "matplotlib", "rich", "sklearn", "h5py", "ml_dtypes"}
ROOMS = {
    # What frameworks share imports none of them.
    "common": (set(), set()),
    "tensorflow": ({"common"}, {"tensorflow"}),
    "jax": ({"common"}, {"jax", "optax"}),
    "torch": ({"common"}, {"torch"}),
    "shell": ({"common"}, set()),
    # A backend's own framework is added below.
    "keras": ({"shell", "tensorflow", "jax", "torch", "common"}, {"keras"}),
    "tf_keras": ({"shell", "tensorflow", "common"}, {"tf_keras", "tensorflow"}),
}
"""For each package below `frameworks`, the others and the frameworks that it may import."""

BACKENDS = set(packages.BACKENDS)
"""What only the module of `frameworks.keras.backends` with that name may import."""

CORE = {"errors", "checks", "packages", "rules", "registry"}
MIDDLE = {*CORE, "arguments", "members"}
FRONT = {*MIDDLE, "optimizer", "older"}
MAY_IMPORT = {
    "errors": set(),
    "checks": {"errors"},
    "members": {"errors"},
    "packages": {"errors"},
    "registry": {"errors", "packages"},
    "older": {"errors"},
    "rules": {"errors", "checks"},
    "arguments": {"errors", "checks", "rules"},
    "optimizer": MIDDLE,
    "frameworks": {*FRONT, "diagnostics", "callbacks"},
    "experimental": {*FRONT, "frameworks"},
    "migration": {*FRONT, "frameworks"},
    "installation": {*FRONT, "frameworks", "experimental", "migration"},
    # A public front of a framework, which imports it.
    "optax": {"packages", "frameworks"},
    # `lossscale` itself.
    "": {*FRONT, "installation"},
    "callbacks": {*MIDDLE, "diagnostics"},
    # The public fronts of frameworks.
    "torch": {"errors", "packages", "frameworks"},
    "diagnostics": CORE,
    "plots": {*CORE, "diagnostics"},
    "demo": {*FRONT, "diagnostics", "plots", "optax", "torch"},
    # Nothing imports the command line, so it may use whatever it shows.
    "cli": {*FRONT, "frameworks", "experimental", "migration", "diagnostics", "plots", "demo", ""},
    "__main__": {"cli"},
}
"""For each part of the library, the parts that it may import besides itself."""

MAY_NAME = {
    # It imports what serves a framework when something of that framework arrives.
    "lossscale.registry": {"frameworks"},
    # The package in a registered name, which stands in files.
    "lossscale.frameworks.shell.loss_scales": {"experimental"},
}
"""For a module, the parts that it may name in a string besides those that it may import."""

FRONTS_OF_FRAMEWORKS = {"optax": {"optax"}}
"""The public modules that are for one framework, and what they import of it."""

MAY_USE_A_FRAMEWORK_INSIDE_A_FUNCTION = {
    "cli",
    "demo",
    "diagnostics",
    "experimental",
    "migration",
}


def in_a_fresh_interpreter(statement, **environment):
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
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    names, seconds = json.loads(done.stdout)
    return {name.partition(".")[0] for name in names}, seconds


def violations(module):
    """Returns what is wrong with the imports of a module, as sentences."""
    if module.part not in MAY_IMPORT:
        return [f"{module.name}: give `{module.part}` a place in MAY_IMPORT"]
    found = []
    for named in modules_named(module):
        if own_part(named.name) not in MAY_NAME.get(module.name, ()):
            found += wrong_way(module, named.name, "names")
    for imported in imports(module):
        if imported.root == "lossscale":
            found += wrong_way(module, imported.name, "imports")
        elif module.part == "frameworks":
            if imported.root in FRAMEWORKS - frameworks_for(module.name):
                found.append(f"{module.name} imports {imported.root}")
        elif imported.root in FRAMEWORKS - FRONTS_OF_FRAMEWORKS.get(module.part, set()) and not (
            imported.lazy and module.part in MAY_USE_A_FRAMEWORK_INSIDE_A_FUNCTION
        ):
            found.append(f"{module.name} imports {imported.root}")
        elif imported.root in {"matplotlib", "rich", "sklearn"} and not imported.lazy:
            found.append(f"{module.name} imports {imported.root} outside a function")
    return found


def wrong_way(module, name, verb):
    """Returns what is wrong with the use of another module of the library, as sentences."""
    target = own_part(name)
    if target not in {*MAY_IMPORT[module.part], module.part}:
        return [f"{module.name} {verb} {name}"]
    if module.part == target == "frameworks":
        here, there = room_of(module.name), room_of(name)
        if there not in {None, here, *ROOMS.get(here, (set(), set()))[0]}:
            return [f"{module.name} {verb} {name}, which is in another room"]
    return []


def own_part(name):
    """The part that a dotted name below `lossscale` belongs to; a public name is of ""."""
    part = (*name.split("."), "")[1]
    return part if part in {*MAY_IMPORT, *(module.part for module in modules())} else ""


def room_of(name):
    """Which package below `lossscale.frameworks` a dotted name belongs to; None for itself."""
    return (*name.split("."), None, None)[2]


def frameworks_for(name):
    """The frameworks that a module below `lossscale.frameworks` may import."""
    room, last = room_of(name), name.rpartition(".")[2]
    backend = {last.partition("_")[0]} & BACKENDS if ".keras.backends." in name else set()
    return ROOMS.get(room, (set(), set()))[1] | backend


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
    fronts = set(FRONTS_OF_FRAMEWORKS)
    assert fronts < below
    below -= fronts
    assert {"callbacks", "experimental", "migration", "plots"} <= below
    program = f"""
import lossscale
assert "lossscale.callbacks" not in sys.modules
assert {below | fronts} <= set(dir(lossscale))
for name in {sorted(below)}:
    assert getattr(lossscale, name) is sys.modules["lossscale." + name], name
lossscale.callbacks.LossScaleMonitor, lossscale.diagnostics.diagnose
"""
    imported, _ = in_a_fresh_interpreter(program)
    assert imported & FRAMEWORKS == set()


WITHOUT_KERAS = """
import importlib, sys, types

class NoKeras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("keras", "tf_keras"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, NoKeras())
# What else they import takes seconds; tests/frameworks/torch has both in a process without Keras.
for name, member in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], member, object)
for name in %r:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_array_code_is_imported_where_keras_cannot_be(framework):
    room = f"lossscale.frameworks.{framework}"
    names = [module.name for module in modules() if module.name.startswith(room)]
    assert len(names) >= 5
    subprocess.run([sys.executable, "-c", WITHOUT_KERAS % names], check=True)


def test_importing_brings_no_shell_of_a_framework_that_is_loaded():
    program = """
import keras
import lossscale
assert not [name for name in sys.modules if name.startswith("lossscale.frameworks.keras")]
assert keras.saving.get_registered_object("lossscale>LossScaleOptimizer") is not None
"""
    # The backend that takes the least time to import.
    imported, _ = in_a_fresh_interpreter(program, KERAS_BACKEND="jax")
    assert "keras" in imported


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
        ("frameworks.keras.shell", "from ..tf_keras import shell"),
        ("frameworks.keras", "def f():\n    import tf_keras"),
        ("frameworks.tf_keras", "from keras import ops"),
        ("frameworks.tf_keras", "from lossscale.frameworks.jax import arrays"),
        ("frameworks.keras.shell", "import tensorflow"),
        ("frameworks.keras.backends.jax", "import torch"),
        ("frameworks.shell.monitor", "import keras"),
        ("frameworks.shell.monitor", "from lossscale.frameworks.keras import monitor"),
        ("frameworks.common.sizes", "import tensorflow"),
        ("frameworks.common.sizes", "from lossscale.frameworks.torch import arrays"),
        ("frameworks.torch.arrays", "import keras"),
        ("frameworks.torch.arrays", "import jax"),
        ("frameworks.jax.arrays", "from lossscale.frameworks.keras import step"),
        ("frameworks.jax.loops", "import flax"),
        ("optax", "import keras"),
        ("optax", "from lossscale.optimizer import LossScaleOptimizer"),
        ("frameworks.unheard_of", "import keras"),
        ("frameworks.keras", "import lossscale.experimental"),
        ("frameworks.keras", "import lossscale"),
        ("frameworks", "import tensorflow"),
        ("diagnostics.measuring", "MODULE = 'lossscale.frameworks.keras.diagnose'"),
        ("callbacks", "import importlib\nimportlib.import_module('lossscale.frameworks.keras')"),
        ("callbacks", "import importlib\nimportlib.import_module('.plots', 'lossscale')"),
        ("callbacks", "import importlib\nimportlib.import_module('.plots', __package__)"),
        ("callbacks", "MODULE = f'lossscale.plots.{name}'"),
        ("callbacks", "MODULE = f'lossscale.{name}'"),
        ("frameworks.jax.arrays", "MODULE = 'lossscale.frameworks.keras.step'"),
        ("frameworks.common.sizes", "MODULE = 'lossscale.frameworks.keras.step'"),
        ("frameworks.keras.backends.jax", "MODULE = 'lossscale.frameworks.tf_keras.step'"),
        ("frameworks.keras.shell", "MODULE = 'lossscale.experimental'"),
        ("rules", "MODULE = 'lossscale.optimizer'"),
        ("registry", "MODULE = 'lossscale.optimizer'"),
        ("diagnostics.measuring", "MODULE = 'lossscale.migration'"),
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
        ("registry", "MODULE = 'lossscale.frameworks.keras.diagnose'"),
        ("installation", "MODULE = 'lossscale.frameworks.keras.installing'"),
        ("frameworks.keras.shell", "MODULE = 'lossscale.frameworks.jax.arrays'"),
        ("rules", "MODULE = 'lossscale.checks'\nSUFFIX = '.optimizer'"),
        ("diagnostics.measuring", "def f():\n    'See `lossscale.frameworks.keras`.'"),
        ("frameworks.keras", "import keras\nfrom lossscale.rules import ScaleRule"),
        ("frameworks.keras.backends.tensorflow", "import keras, tensorflow"),
        ("frameworks.keras.backends.torch_state", "import keras, torch"),
        ("frameworks.keras.backends.jax", "from lossscale.frameworks.jax import arrays"),
        ("frameworks.keras.shell", "from . import slots\nfrom ..shell import contract"),
        ("frameworks.tf_keras", "import tensorflow, tf_keras"),
        ("frameworks.tf_keras", "from lossscale.frameworks.tensorflow import step"),
        ("frameworks.jax.exponents", "import jax\nimport lossscale.diagnostics.exponents"),
        ("experimental.loss_scale", "def f():\n    import tensorflow"),
        ("optax", "import optax\nfrom lossscale.frameworks.jax import loops"),
        ("diagnostics.verdict", "import numpy\nfrom lossscale.rules import DynamicScale"),
        ("plots.histogram", "def f():\n    import matplotlib.pyplot\nimport lossscale.diagnostics"),
        ("cli.demo", "from lossscale import LossScaleOptimizer\ndef f():\n    import keras"),
        ("", "from lossscale.rules import DynamicScale\nfrom lossscale import optimizer"),
    ],
)
def test_an_import_that_points_the_right_way_is_let_pass(name, source):
    assert violations(Module(f"lossscale.{name}".rstrip("."), source)) == []

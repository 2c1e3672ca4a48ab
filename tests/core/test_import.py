"""What importing the library costs, and which of its parts may import which."""

import json
import subprocess
import sys

import pytest

from core.source_tree import FRAMEWORKS, imports, modules

# A part is a file or a folder of src/lossscale; `lossscale` is the package itself. Each may import
# itself, those that are named here, and the frameworks at the end, whose names begin with a star;
# `**any` is for the inside of functions. Nothing else is allowed.
ARROWS = {
    "errors": "",
    "framework_types": "",  # which all may import
    "checks": "errors",
    "packages": "errors",
    "old_formats": "errors packages",
    "rules": "errors checks",
    "registry": "errors packages",
    "arguments": "errors checks rules",
    "wrapper": "errors arguments rules",
    "optimizer": "errors wrapper registry rules",
    "diagnosis": "errors checks rules common explain jax keras torch optax *keras *jax *torch "
    "*tensorflow **any",
    "explain": "errors checks common jax torch *jax *torch *tensorflow",
    "monitoring": "errors checks packages registry rules",
    "callbacks": "errors registry optimizer monitoring",
    "common": "errors packages rules monitoring",
    "jax": "common monitoring *jax",
    "tensorflow": "errors registry common monitoring *tensorflow",
    "keras_common": "errors packages rules arguments wrapper old_formats common",
    "torch": "errors checks packages registry rules arguments wrapper optimizer common monitoring "
    "*torch",
    "optax": "errors checks packages registry rules arguments common jax monitoring *jax *optax",
    # A backend of Keras imports its own framework as well.
    "keras": "errors packages rules registry wrapper arguments optimizer old_formats common "
    "keras_common tensorflow jax torch callbacks *keras",
    "tf_keras": "errors rules registry wrapper arguments optimizer old_formats common "
    "keras_common tensorflow callbacks *tf_keras *tensorflow",
    "experimental": "errors checks rules registry arguments optimizer keras_common keras "
    "tf_keras *keras *tf_keras",
    "install_names": "errors registry wrapper optimizer common experimental keras *tensorflow "
    "**any",
    "installation": "registry common",
    "lossscale": "errors registry rules optimizer installation",
}
# `diagnose` is one of their names for users, and monitors repeat a step as it does: both import it
# when it is asked for.
OFFER_A_DIAGNOSIS = ("lossscale.optax", "lossscale.torch", "lossscale.optax.monitor")


def violations(name, source):
    """Returns what is wrong with the imports of a module, as sentences."""
    part = part_of(name)
    allowed = {part, "framework_types", *ARROWS[part].split()}
    if ".keras.backends." in name:
        allowed.add(f"*{name.rpartition('.')[2]}")
    return [f"{name} imports {one}" for one in imports(source) if not may(name, one, allowed)]


def may(name, imported, allowed):
    """Whether a module may import something, given what its part may."""
    other = part_of(imported.name)
    if imported.root == "lossscale":
        offered = name in OFFER_A_DIAGNOSIS and other == "diagnosis" and imported.lazy
        return other in allowed or offered
    if imported.root in FRAMEWORKS:
        return f"*{imported.root}" in allowed or (imported.lazy and "**any" in allowed)
    return imported.root != "matplotlib" or imported.lazy


def part_of(name):
    """The part that a dotted name belongs to; a public name is of `lossscale`."""
    part = (*name.split("."), "lossscale")[1]
    return part if part in ARROWS or f"lossscale.{part}" in modules() else "lossscale"


def test_imports_point_one_way():
    assert [violations(*module) for module in modules().items() if violations(*module)] == []


def test_the_arrows_point_one_way_and_each_is_used():
    rest = {part: set(allowed.split()) for part, allowed in ARROWS.items()}
    unused = {part: {one for one in allowed if one[0] != "*"} for part, allowed in rest.items()}
    for name, source in modules().items():
        unused[part_of(name)] -= {part_of(imported.name) for imported in imports(source)}
    assert {part: left for part, left in unused.items() if left} == {}
    while rest:
        lowest = [part for part, below in rest.items() if not below & set(rest)]
        assert lowest, f"these import each other: {sorted(rest)}"
        for part in lowest:
            del rest[part]


@pytest.mark.parametrize(
    ("name", "source", "is_wrong"),
    [
        ("rules", "def f():\n    import torch", True),
        ("callbacks", "import importlib\nimportlib.import_module('lossscale.diagnosis')", True),
        ("keras.backends.tensorflow", "import tensorflow", False),
        ("optax", "from lossscale.diagnosis.jax import diagnose", True),
        ("optax", "def f():\n    from lossscale.diagnosis.jax import diagnose", False),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(name, source, is_wrong):
    assert bool(violations(f"lossscale.{name}", source)) == is_wrong


def imported_by(statement):
    """The modules that a statement imports in an interpreter of its own."""
    program = f"""
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def roots(names):
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("name", "most"), [("lossscale", 90), ("lossscale.rules", 90), ("lossscale.callbacks", 160)]
)
def test_importing_brings_the_standard_library_only_and_little_of_it(name, most):
    found = imported_by(f"import {name}")
    assert roots(found) - sys.stdlib_module_names == {"lossscale"}
    assert len(found) < most


PUBLIC = ("callbacks", "diagnosis", "experimental", "monitoring")


def test_every_public_submodule_is_an_attribute_after_importing_the_library_alone():
    program = f"""
import sys
import lossscale
assert "lossscale.callbacks" not in sys.modules
assert {{*{PUBLIC}, "torch", "optax"}} <= set(dir(lossscale))
assert "explain" not in dir(lossscale)
for name in (*{PUBLIC}, "torch"):
    assert getattr(lossscale, name) is sys.modules["lossscale." + name], name
lossscale.callbacks.LossScaleMonitor, lossscale.diagnosis.diagnose
assert not [name for name in sys.modules if name.startswith("lossscale.explain")]
lossscale.monitoring.Explanation, lossscale.monitoring.Cause
"""
    assert roots(imported_by(program)) & FRAMEWORKS == set()

"""The package: its version, its names, and examples that print what they say."""

import doctest
import importlib
import pathlib
import tomllib

import pytest

import lossscale
import lossscale_migration

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted(
    path.stem for path in pathlib.Path(lossscale_migration.__file__).parent.glob("*.py")
)
WITH_EXAMPLES = ("array_roles", "damaged_files", "layer_weights", "layers", "numbered_arrays")


def test_it_is_of_the_release_that_it_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == lossscale.__version__
    assert f"lossscale=={lossscale.__version__}" in project["dependencies"]


def test_its_page_leads_nowhere_and_its_license_is_that_of_the_repository():
    assert "](" not in (ROOT / "README.md").read_text()
    assert (ROOT / "LICENSE").read_text() == (ROOT.parent / "LICENSE").read_text()


def test_every_public_name_is_documented():
    for name in lossscale_migration.__all__:
        assert (getattr(lossscale_migration, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    module = importlib.import_module(f"lossscale_migration.{name}")
    found = doctest.testmod(module, optionflags=options)
    assert found.failed == 0
    assert (found.attempted > 0) == (name in WITH_EXAMPLES)

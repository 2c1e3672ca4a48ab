import importlib
import pathlib
import tomllib
from importlib import metadata

import pytest

import lossscale

PUBLIC = {
    "lossscale": {
        "DynamicScale",
        "FixedScale",
        "Installation",
        "LossScaleError",
        "LossScaleOptimizer",
        "LossScaleWarning",
        "ScaleRule",
        "ScaleState",
        "__version__",
        "install",
        "register",
    },
    "lossscale.experimental": {
        "DynamicLossScale",
        "FixedLossScale",
        "LossScale",
        "LossScaleOptimizer",
    },
    "lossscale.migration": {
        "FileDescription",
        "OptimizerDescription",
        "Restored",
        "check_file",
        "describe_file",
        "load_model",
        "migrate_file",
        "restore_checkpoint",
    },
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module):
    found = importlib.import_module(module)
    assert set(found.__all__) == PUBLIC[module]
    assert all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module):
    found = importlib.import_module(module)
    for name in found.__all__:
        assert (getattr(found, name).__doc__ or "").strip(), name


def test_every_member_of_the_keras_optimizer_is_documented():
    from lossscale.frameworks.keras import KerasLossScaleOptimizer

    for cls in KerasLossScaleOptimizer.__mro__:
        if cls.__module__.startswith("lossscale"):
            for name, member in vars(cls).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                    assert (member.__doc__ or "").strip(), f"{cls.__name__}.{name}"


def test_the_version_is_the_installed_one():
    assert lossscale.__version__ == metadata.version("lossscale")
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "lossscale.__version__"


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(lossscale, "plotting")
    with pytest.raises(AttributeError, match="'lossscale' has no attribute 'plotting'"):
        lossscale.plotting  # noqa: B018

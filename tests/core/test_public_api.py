import importlib

import pytest

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

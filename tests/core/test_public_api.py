import importlib
import inspect
import pathlib
import pydoc
import re
import tomllib
from importlib import metadata

import pytest

import lossscale
from lossscale.callbacks import LossScaleMonitor
from lossscale.keras_common.contract import Shell, ShellClass
from lossscale.members import OptimizerMembers
from lossscale.torch.names import LossScaleOptimizer as TorchLossScaleOptimizer

ROOT = pathlib.Path(__file__).parents[2]

DECLARED = [name for name in vars(OptimizerMembers) if not name.startswith("_")]
OF_KERAS_3_ONLY = {"scale_loss", "apply", "stateless_apply"}

PUBLIC = {
    "lossscale": {
        "DynamicScale",
        "FixedScale",
        "Installation",
        "LossScaleError",
        "LossScaleOptimizer",
        "LossScaleWarning",
        "Needs",
        "ScaleRule",
        "ScaleState",
        "Seen",
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
    from lossscale.keras import KerasLossScaleOptimizer

    for cls in KerasLossScaleOptimizer.__mro__:
        if cls.__module__.startswith("lossscale"):
            for name, member in vars(cls).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                    mro = [vars(cls).get(name) for cls in KerasLossScaleOptimizer.__mro__]
                    # Of a property a subclass does not inherit the docstring.
                    assert any((member.__doc__ or "").strip() for member in mro if member), name


def test_help_shows_every_documented_member_once():
    shown = pydoc.render_doc(lossscale.LossScaleOptimizer, renderer=pydoc.plaintext)
    for name in DECLARED:
        assert (inspect.getdoc(getattr(lossscale.LossScaleOptimizer, name)) or "").strip(), name
        assert name in shown
    for shell in shells():
        for name in DECLARED:
            own = [cls for cls in shell.__mro__ if name in vars(cls)]
            # Each shell has it, or says that it has not; and it repeats no docstring.
            assert own[0] is not lossscale.LossScaleOptimizer or name in OF_KERAS_3_ONLY
            texts = {
                vars(cls)[name].__doc__
                for cls in own
                if cls.__module__.startswith("lossscale.") and vars(cls)[name].__doc__
            }
            assert len(texts) == 1, (shell.__name__, name)


def test_every_member_on_the_page_about_them_is_declared():
    page = (ROOT / "docs/documented_api.md").read_text()
    page = page.partition("## Members")[2].partition("\n## ")[0]
    # The first column; after the names of settings of any optimizer comes no `(`.
    columns = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    names = {name for column in columns for name in re.findall(r"`(\w+)", column)}
    declared = {
        name
        for cls in lossscale.LossScaleOptimizer.__mro__
        for name in {**vars(cls), **vars(cls).get("__annotations__", {})}
    }
    assert len(names) > 30
    assert names - declared == set()


def test_help_shows_what_the_constructors_take():
    shown = inspect.signature(lossscale.LossScaleOptimizer).parameters.values()
    for shell in (*shells(), TorchLossScaleOptimizer):
        taken = inspect.signature(shell.__init__).parameters
        for parameter in shown:
            same = taken[parameter.name]
            assert (same.kind, same.default) == (parameter.kind, parameter.default)

    class Own(lossscale.LossScaleOptimizer):
        def __init__(self, inner, tag): ...

    assert str(inspect.signature(Own)) == "(inner, tag)"
    monitor = inspect.signature(LossScaleMonitor)
    assert list(monitor.parameters)[:3] == ["path", "every", "tensorboard"]


def test_every_shell_offers_all_of_the_contract():
    asked = {
        name
        for protocol in (ShellClass, Shell)
        for name in {**vars(protocol), **protocol.__annotations__}
        if name.startswith("_") and not name.startswith(("__", "_abc", "_is_", "_non"))
    }
    assert len(asked) >= 15
    for shell in shells():
        ours = [cls for cls in shell.__mro__ if cls.__module__.startswith("lossscale.")]
        offered = {
            name for cls in ours for name in {**vars(cls), **vars(cls).get("__annotations__", {})}
        }
        assert asked <= offered, (shell.__name__, asked - offered)


def shells():
    from lossscale import keras, tf_keras

    return [
        keras.KerasLossScaleOptimizer,
        tf_keras.TFKerasLossScaleOptimizer,
        tf_keras.TFKerasLegacyLossScaleOptimizer,
    ]


def test_the_version_is_the_installed_one():
    assert lossscale.__version__ == metadata.version("lossscale")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "lossscale.__version__"


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(lossscale, "plotting")
    with pytest.raises(AttributeError, match="'lossscale' has no attribute 'plotting'"):
        lossscale.plotting  # noqa: B018

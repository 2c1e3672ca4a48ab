"""What users are given: names, help on them, types, and examples that print what they say."""

import functools
import importlib
import inspect
import pathlib
import re
import tomllib
from importlib import metadata

import pytest

import lossscale
from core.source_tree import modules
from lossscale.callbacks import LossScaleMonitor
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.torch import LossScaleOptimizer as TorchLossScaleOptimizer
from pages import examples_tried

ROOT = pathlib.Path(__file__).parents[2]

DECLARED = [
    name
    for cls in KerasCommonOptimizer.__mro__
    if cls.__module__.startswith("lossscale.keras_common.")
    for name in vars(cls)
    if not name.startswith("_")
]

PUBLIC = {
    "lossscale": "DynamicScale FixedScale Installation LossScaleError LossScaleOptimizer "
    "LossScaleWarning ScaleRule ScaleState __version__ install",
    "lossscale.experimental": "DynamicLossScale FixedLossScale LossScale LossScaleOptimizer",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these_and_are_documented(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    for name in found.__all__:
        assert (getattr(found, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("module", [lossscale, lossscale.torch], ids=lambda m: m.__name__)
def test_completion_offers_names_that_are_imported_when_they_are_asked_for(module):
    assert set(module.__all__) <= set(dir(module))


def test_every_member_of_a_wrapper_is_documented():
    for wrapper in (*wrappers(), TorchLossScaleOptimizer):
        names = {name for cls in ours_in(wrapper) for name in vars(cls) if name[0] != "_"}
        for name in names:
            member = inspect.getattr_static(wrapper, name)
            if callable(member) or isinstance(member, property):
                # A property does not inherit the docstring of the one that it overrides.
                documented = [vars(each).get(name) for each in wrapper.__mro__]
                assert any(getattr(each, "__doc__", None) for each in documented), name


def test_a_wrapper_has_nothing_that_is_only_declared():
    for wrapper in wrappers():
        members = [getattr(wrapper, name) for name in DECLARED]
        assert not [each for each in members if getattr(each, "__isabstractmethod__", False)]
    assert not hasattr(TorchLossScaleOptimizer, "get_slot")


@pytest.mark.parametrize("front", [lossscale, lossscale.experimental], ids=lambda m: m.__name__)
def test_a_subclass_of_what_picks_a_wrapper_is_told_which_class_to_inherit_from(front):
    with pytest.raises(
        TypeError, match=f"class Own.*Inherit .*{front.__name__}.keras.LossScaleOptimizer "
    ):

        class Own(front.LossScaleOptimizer):
            pass


def test_each_wrapper_and_its_subclasses_are_loss_scale_optimizers():
    experimental = lossscale.experimental
    for wrapper in (*wrappers(), TorchLossScaleOptimizer, lossscale.tf_keras.LossScaleOptimizer):
        assert issubclass(wrapper, lossscale.LossScaleOptimizer)
        assert issubclass(type("Own", (wrapper,), {}), lossscale.LossScaleOptimizer)
        assert not issubclass(wrapper, experimental.LossScaleOptimizer)
    for keras in (experimental.keras, experimental.tf_keras):
        assert issubclass(keras.LossScaleOptimizer, experimental.LossScaleOptimizer)
        assert issubclass(keras.LossScaleOptimizer, lossscale.LossScaleOptimizer)


def test_help_shows_what_the_constructors_take():
    shown = inspect.signature(lossscale.LossScaleOptimizer).parameters.values()
    for wrapper in (*wrappers(), TorchLossScaleOptimizer):
        taken = inspect.signature(wrapper.__init__).parameters
        for parameter in shown:
            if parameter.kind is not parameter.VAR_KEYWORD:
                same = taken[parameter.name]
                assert (same.kind, same.default) == (parameter.kind, parameter.default)
    monitor = inspect.signature(LossScaleMonitor)
    assert list(monitor.parameters)[:3] == ["path", "every", "log"]


def ours_in(cls):
    return [base for base in cls.__mro__ if base.__module__.startswith("lossscale.")]


@functools.cache
def wrappers():
    import keras
    import tf_keras

    optimizers = (keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy)
    return [type(lossscale.LossScaleOptimizer(each.SGD())) for each in optimizers]


def test_one_version_is_named_everywhere():
    said = lossscale.__version__
    assert said == metadata.version("lossscale")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "lossscale.__version__"
    assert f"\nversion: {said}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[([\d.]+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == said


def test_the_page_of_the_package_leads_nowhere_that_is_not_there():
    page = (ROOT / "PACKAGE.md").read_text()
    assert re.findall(r"\]\(|<img|src=", page) == []


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(lossscale, "plotting")
    with pytest.raises(AttributeError, match="'lossscale' has no attribute 'plotting'"):
        lossscale.plotting  # noqa: B018


def test_a_list_of_optimizers_is_of_the_framework_of_the_first():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for given in (optimizer, [optimizer], (optimizer, optimizer)):
        assert lossscale.registry.framework_of(given).root == "torch"
    for given in ([], (), None, "sgd", torch.optim.SGD, [None]):
        with pytest.raises(TypeError, match="must be an optimizer to wrap"):
            lossscale.registry.framework_of(given)


# These have tests of their examples themselves.
ELSEWHERE = {"keras", "tf_keras", "torch", "optax"}
WITH_EXAMPLES = [
    name
    for name, source in modules().items()
    if ">>> " in source and not ELSEWHERE & {*name.split(".")[1:2]}
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_print_what_they_say(name):
    # Those of the members say once what holds for every framework.
    of_all = name.startswith("lossscale.keras_common.")
    roots = {"keras": "keras", "lossscale": "lossscale", "tf": "tensorflow", "np": "numpy"}
    given = {short: importlib.import_module(root) for short, root in roots.items() if of_all}
    module = importlib.import_module(name)
    attempted = examples_tried(module, {**vars(module), **given})
    of_members = {"optimizer": 20, "slots": 10}
    assert attempted >= (of_members.get(name.rpartition(".")[2], 1) if of_all else 1)

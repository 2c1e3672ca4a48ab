"""A configuration that is none says so, whatever part of it is malformed, and in every shell."""

import keras
import pytest
import tf_keras

import lossscale
from lossscale import experimental
from lossscale.errors import ArgumentError

INNER = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
SHELLS = {
    f"{name}-{library.__name__}": type(wrapper(library.optimizers.SGD(), *arguments))
    for name, wrapper, arguments in (
        ("documented", lossscale.LossScaleOptimizer, ()),
        ("experimental", experimental.LossScaleOptimizer, ("dynamic",)),
    )
    for library in (keras, tf_keras)
}

NO_DESCRIPTION = (None, 3, "sgd", {}, {"class_name": "SGD"}, {"class_name": 3, "config": {}})
MALFORMED = [
    *(None, 3, "sgd", [], {}),
    *({"inner_optimizer": described} for described in NO_DESCRIPTION),
    *({"inner_optimizer": INNER, "rule": described} for described in NO_DESCRIPTION),
    {"inner_optimizer": {"class_name": "Nope", "config": {}}},
    {"inner_optimizer": INNER, "rule": {"class_name": "Nope", "config": {}}},
    {"inner_optimizer": INNER, "rule": {"class_name": "DynamicScale", "config": {"x": 1}}},
    {"inner_optimizer": INNER, "nonsense": 1},
    {"inner_optimizer": INNER, "initial_scale": "x"},
    *({"optimizer": INNER, "loss_scale": described} for described in ({}, {"class_name": "X"})),
    {"optimizer": INNER, "loss_scale": {"class_name": "DynamicLossScale", "config": {"x": 1}}},
    {"optimizer": INNER, "loss_scale": {"class_name": "FixedLossScale", "config": {}}},
]


@pytest.mark.parametrize("config", MALFORMED, ids=str)
@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_it_is_a_value_error_that_shows_what_came(shell, config):
    said = r"Received|[Uu]nknown|not known|cannot be made|has no (keys|argument)"
    with pytest.raises(ValueError, match=said) as raised:
        shell.from_config(config)
    # Which optimizers there are, each library says itself.
    assert isinstance(raised.value, ArgumentError) or "Nope" in str(raised.value)


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_one_that_is_well_formed_is_taken(shell):
    assert shell.from_config({"inner_optimizer": INNER}).dynamic

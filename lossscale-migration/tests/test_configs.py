"""Every dictionary that a release of TensorFlow wrote becomes an optimizer of ours, or an error."""

import copy
import json

import keras
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from lossscale import DynamicScale, FixedScale, experimental
from lossscale.errors import ArgumentError
from lossscale.keras import LossScaleOptimizer
from lossscale.old_formats import inner_config
from support import FAMILIES, WITNESS

OLD_SGD = {"name": "SGD", "learning_rate": 0.1, "decay": 0.0, "momentum": 0.9, "nesterov": False}
# In a file the rate is no scalar of NumPy.
NEW_SGD = {**tf_keras.optimizers.SGD(momentum=0.9).get_config(), "learning_rate": 0.1}
KERAS_3_SGD = keras.optimizers.SGD(0.1, momentum=0.9).get_config()


def described(module, config, registered_name=None):
    """An SGD in the form that names its module, as since 2.12."""
    return {
        "module": module,
        "class_name": "SGD",
        "config": config,
        "registered_name": registered_name,
    }


# What stands under `inner_optimizer` or `optimizer`.
INNERS = {
    "2.0": {"class_name": "SGD", "config": OLD_SGD},
    "lower case": {"class_name": "sgd", "config": OLD_SGD},
    "lr": {"class_name": "SGD", "config": {"lr": 0.1, "momentum": 0.9}},
    "2.15 legacy": described("keras.optimizers.legacy", OLD_SGD),
    "2.12 legacy": described("keras.src.optimizers.legacy.gradient_descent", OLD_SGD, "SGD"),
    "2.8 new": {"class_name": "Custom>SGD", "config": NEW_SGD},
    "2.11 new": {"class_name": "SGD", "config": NEW_SGD},
    "2.15 new": described("keras.optimizers.experimental", NEW_SGD),
    "tf_keras new": described("keras.optimizers", NEW_SGD),
    "keras 3": described("keras.optimizers", KERAS_3_SGD),
}


def loss_scale(name, **config):
    return {"loss_scale": {"class_name": name, "config": config}}


def dynamic(multiplier):
    settings = {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": multiplier}
    return loss_scale("DynamicLossScale", **settings)


DYNAMIC_4 = DynamicScale(8.0, 3, growth_factor=4.0, backoff_factor=0.25)
# What stands around it, with the key of the inner optimizer and the rule that is meant.
OUTERS = {
    "2.0 dynamic": ("optimizer", dynamic(2.0), DynamicScale(8.0, 3)),
    "2.0 multiplier": ("optimizer", dynamic(4.0), DYNAMIC_4),
    "2.0 fixed": ("optimizer", loss_scale("FixedLossScale", loss_scale_value=8.0), FixedScale(8.0)),
    "2.4 dynamic": (
        "inner_optimizer",
        {"dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 3},
        DynamicScale(8.0, 3),
    ),
    "2.4 fixed": (
        "inner_optimizer",
        {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": None},
        FixedScale(8.0),
    ),
    "keras 3": (
        "inner_optimizer",
        {
            **dict.fromkeys(["weight_decay", "clipnorm", "global_clipnorm", "clipvalue"]),
            **dict.fromkeys(["ema_overwrite_frequency", "gradient_accumulation_steps"]),
            "use_ema": False,
            "ema_momentum": 0.99,
            "loss_scale_factor": None,
            "name": "loss_scale_optimizer",
            "initial_scale": 8.0,
            "dynamic_growth_steps": 3,
        },
        DynamicScale(8.0, 3),
    ),
}


def config(outer, inner):
    key, rest, rule = OUTERS[outer]
    return {key: copy.deepcopy(INNERS[inner]), **copy.deepcopy(rest)}, rule


def assert_sgd(optimizer, rule):
    assert isinstance(optimizer, LossScaleOptimizer)
    assert optimizer.rule == rule
    inner = optimizer.inner_optimizer
    assert type(inner) is keras.optimizers.SGD
    assert float(inner.learning_rate) == pytest.approx(0.1)
    assert (inner.momentum, inner.nesterov) == (0.9, False)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("outer", OUTERS)
def test_from_config_reads_every_era_and_that_of_the_older_class_its_own(outer, inner):
    written, rule = config(outer, inner)
    before = json.dumps(written)
    assert_sgd(LossScaleOptimizer.from_config(written), rule)
    older = type(experimental.LossScaleOptimizer(keras.optimizers.SGD(), "dynamic"))
    if "loss_scale" in written:
        optimizer = older.from_config(written)
        assert_sgd(optimizer, rule)
        assert isinstance(optimizer, older)
        assert optimizer.loss_scale() == 8.0
    else:
        with pytest.raises(ValueError, match=r"call lossscale\.LossScaleOptimizer\.from_config"):
            older.from_config(written)
    assert json.dumps(written) == before, "the caller's dictionary was changed"


SERIALIZED = {
    "by name": {"class_name": "LossScaleOptimizer"},
    "V1": {"class_name": "LossScaleOptimizerV1"},
    "V3": {"class_name": "LossScaleOptimizerV3"},
    **{
        f"2.15 {name}": {
            "module": f"{library}.src.mixed_precision.loss_scale_optimizer",
            "class_name": name,
            "registered_name": name,
        }
        for library, name in (("tf_keras", "LossScaleOptimizer"), ("keras", "LossScaleOptimizerV3"))
    },
}


@pytest.mark.parametrize("outer", [name for name in OUTERS if name != "keras 3"])
@pytest.mark.parametrize("names", SERIALIZED)
def test_keras_saving_reads_every_era(names, outer):
    settings, rule = config(outer, "2.0" if outer.startswith("2.0") else "2.15 legacy")
    written = {**SERIALIZED[names], "config": settings}
    assert_sgd(keras.saving.deserialize_keras_object(written), rule)
    if names in ("V1", "V3"):
        assert_sgd(keras.optimizers.deserialize(written), rule)


def test_what_keras_3_wrote_stays_its_own():
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=8.0)
    for serialize, deserialize in (
        (keras.saving.serialize_keras_object, keras.saving.deserialize_keras_object),
        (keras.optimizers.serialize, keras.optimizers.deserialize),
    ):
        assert type(deserialize(serialize(own))) is keras.optimizers.LossScaleOptimizer


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "RMSprop", "SGD"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_tf_keras_writes_becomes_the_same_optimizer(name, family):
    inner = getattr(FAMILIES[family], name)(learning_rate=0.25, clipnorm=1.5)
    witness = WITNESS(inner, initial_scale=8.0)
    optimizer = LossScaleOptimizer.from_config(witness.get_config())
    assert type(optimizer.inner_optimizer) is getattr(keras.optimizers, name)
    ours, theirs = optimizer.inner_optimizer.get_config(), inner.get_config()
    shared = (set(ours) & set(theirs)) - {"name"}
    assert {"learning_rate", "clipnorm"} <= shared
    assert {k: ours[k] for k in shared} == pytest.approx({k: theirs[k] for k in shared})
    # Nothing but what says how TensorFlow was to run it is left behind.
    left = {key for key in set(theirs) - set(ours) if theirs[key] not in (None, 0.0)}
    assert left <= {"jit_compile", "is_legacy_optimizer"}


SCHEDULES = {
    "ExponentialDecay": {"decay_steps": 4, "decay_rate": 0.5},
    "InverseTimeDecay": {"decay_steps": 4, "decay_rate": 0.5},
    "PolynomialDecay": {"decay_steps": 10},
    "CosineDecay": {"decay_steps": 10},
    "CosineDecayRestarts": {"first_decay_steps": 5},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_give_the_same_rates(name, family):
    schedule = getattr(tf_keras.optimizers.schedules, name)(0.5, **SCHEDULES[name])
    written = WITNESS(FAMILIES[family].SGD(schedule)).get_config()
    optimizer = LossScaleOptimizer.from_config(written)
    for step in (0, 3, 7):
        optimizer.inner_optimizer.iterations.assign(step)
        assert float(optimizer.learning_rate) == pytest.approx(float(schedule(step)))


def from_inner(name, **settings):
    inner = {"class_name": name, "config": settings}
    return LossScaleOptimizer.from_config({"inner_optimizer": inner, **OUTERS["2.4 dynamic"][1]})


def test_rates_of_other_forms():
    settings = {"boundaries": [2, 5], "values": [1.0, 0.5, 0.25], "name": None}
    rate = {"class_name": "PiecewiseConstantDecay", "config": settings}
    assert float(from_inner("SGD", learning_rate=rate).learning_rate) == 1.0
    # A decay becomes a schedule.
    optimizer = from_inner("Adam", learning_rate=0.5, decay=0.25, epsilon=None)
    for step in (0, 1, 6):
        optimizer.inner_optimizer.iterations.assign(step)
        assert float(optimizer.learning_rate) == pytest.approx(0.5 / (1 + 0.25 * step))
    assert optimizer.inner_optimizer.epsilon == 1e-7
    # That of Nadam is no decay of the learning rate, but a slow rise of its momentum.
    with pytest.warns(lossscale.LossScaleWarning, match=r"schedule_decay=0\.004"):
        optimizer = from_inner("Nadam", learning_rate=0.5, decay=0.004)
    assert float(optimizer.learning_rate) == 0.5


SCHEDULE = {"class_name": "ExponentialDecay", "config": {}}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("SGD", {"learning_rate": SCHEDULE, "decay": 0.1}, "decay=0.1 and a schedule"),
        ("SGD", {"decay": 0.1}, "decay=0.1 and no learning rate"),
        ("SGD", {"learning_rate": {"class_name": "LinearCosineDecay"}}, "'LinearCosineDecay'"),
        ("SGD", {"learning_rate": 0.1, "warp": 3}, "warp"),
        ("Unheard", {"learning_rate": 0.1}, "'Unheard' in the configuration is not known"),
    ],
)
def test_what_keras_3_cannot_do_is_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        from_inner(name, **settings)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (loss_scale("DynamicLossScale", multiplier=1.0), "`multiplier` must be a number above 1"),
        (loss_scale("DynamicLossScale", initial_loss_scale=0.0), "`initial_loss_scale`"),
        (loss_scale("FixedLossScale", loss_scale_value=float("inf")), "`loss_scale_value`"),
        (loss_scale("Mine"), "Unknown loss scale class. Received: 'Mine'"),
    ],
)
def test_scales_that_cannot_be_used_are_named(written, message):
    with pytest.raises(ArgumentError, match=message):
        LossScaleOptimizer.from_config({"optimizer": INNERS["2.0"], **written})


class SGD(keras.optimizers.SGD):
    """An optimizer of one's own with the name of Keras'."""


@pytest.mark.parametrize("by", ["argument", "scope"])
def test_a_class_of_ones_own_gets_its_configuration_as_it_is(by):
    inner = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.5}}
    written = {"inner_optimizer": inner, "dynamic": True, "initial_scale": 8.0}
    own = {"SGD": SGD, "sgd": SGD}
    if by == "argument":
        optimizer = LossScaleOptimizer.from_config(written, own)
    else:
        with keras.saving.custom_object_scope(own):
            optimizer = LossScaleOptimizer.from_config(written)
    assert type(optimizer.inner_optimizer) is SGD
    # An instance stays itself.
    written["inner_optimizer"] = made = keras.optimizers.Adam()
    assert LossScaleOptimizer.from_config(written).inner_optimizer is made


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Lion", "Adafactor"])
def test_what_keras_3_writes_keeps_its_meaning(optimizer):
    made = getattr(keras.optimizers, optimizer)(gradient_accumulation_steps=2, weight_decay=0.5)
    written = keras.optimizers.serialize(made)
    read = keras.optimizers.deserialize(inner_config(written))
    assert read.get_config() == made.get_config()


@pytest.mark.parametrize("optimizers", [*FAMILIES.values(), keras.optimizers])
def test_beside_keras_3_each_optimizer_gets_its_own_class(optimizers):
    assert tf.keras.optimizers.SGD is keras.optimizers.SGD
    made = lossscale.LossScaleOptimizer(optimizers.SGD(0.25))
    assert isinstance(made, optimizers.Optimizer)
    assert type(lossscale.LossScaleOptimizer.from_config(made.get_config())) is type(made)
    scale = experimental.DynamicLossScale(8.0)
    assert float(scale()) == 8.0
    variable = tf.Variable(1.0)
    older = experimental.LossScaleOptimizer(optimizers.SGD(0.25), scale)
    older.minimize(lambda: variable**2, [variable])
    assert float(variable) == 0.5


PLAIN_SGD = {"class_name": "SGD", "config": {"learning_rate": 0.1}}
WRAPPERS = {
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
    *({"inner_optimizer": PLAIN_SGD, "rule": described} for described in NO_DESCRIPTION),
    {"inner_optimizer": {"class_name": "Nope", "config": {}}},
    {"inner_optimizer": PLAIN_SGD, "rule": {"class_name": "Nope", "config": {}}},
    {"inner_optimizer": PLAIN_SGD, "rule": {"class_name": "DynamicScale", "config": {"x": 1}}},
    {"inner_optimizer": PLAIN_SGD, "nonsense": 1},
    {"inner_optimizer": PLAIN_SGD, "initial_scale": "x"},
    *({"optimizer": PLAIN_SGD, "loss_scale": described} for described in ({}, {"class_name": "X"})),
    {"optimizer": PLAIN_SGD, "loss_scale": {"class_name": "DynamicLossScale", "config": {"x": 1}}},
    {"optimizer": PLAIN_SGD, "loss_scale": {"class_name": "FixedLossScale", "config": {}}},
]


@pytest.mark.parametrize("config", MALFORMED, ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_one_that_is_malformed_is_a_value_error_that_shows_what_came(wrapper, config):
    message = r"Received|[Uu]nknown|not known|cannot be made|has no (keys|argument)"
    with pytest.raises(ValueError, match=message) as raised:
        wrapper.from_config(config)
    # Which optimizers there are, each library says itself.
    assert isinstance(raised.value, ArgumentError) or "Nope" in str(raised.value)


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_one_that_is_well_formed_is_taken(wrapper):
    assert wrapper.from_config({"optimizer": PLAIN_SGD, **loss_scale("DynamicLossScale")}).dynamic

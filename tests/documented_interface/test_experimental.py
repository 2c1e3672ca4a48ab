"""`lossscale.experimental`: loss scales as objects, and the optimizer that holds one."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from backends.support import assert_same, everything, sgd
from lossscale import experimental
from lossscale.errors import UnsupportedError
from lossscale.experimental import DynamicLossScale, FixedLossScale, LossScale
from seeding import seed

_GOOD = [1.0]
_BAD = [float("inf")]


def _state(loss_scale):
    """Returns the scale and the finite steps since it moved."""
    variables = loss_scale._bound_state().variables
    return float(loss_scale()), int(variables["good_steps"])


class Halving(LossScale):
    """A loss scale of one's own: halves after every applied step, refuses gradients above 4."""

    def __init__(self, start, lowest=1.0):
        self._start = start
        self._lowest = lowest
        self._scale = self._add_weight("scale", start, "float32")

    def __call__(self):
        return tf.convert_to_tensor(self._scale)

    def update(self, grads):
        largest = tf.reduce_max([tf.reduce_max(tf.abs(g)) for g in tf.nest.flatten(grads)])
        applied = largest <= 4.0
        scale = tf.convert_to_tensor(self._scale)
        self._scale.assign(tf.where(applied, tf.maximum(scale / 2, self._lowest), scale))
        return None, applied

    def get_config(self):
        return {"start": self._start, "lowest": self._lowest}


TWO_KINDS = pytest.mark.parametrize(
    "make", [lambda: DynamicLossScale(8, 3), lambda: Halving(8.0)], ids=["dynamic", "own"]
)


@pytest.mark.parametrize("gradients", [_GOOD, _BAD, [], [None]])
def test_a_fixed_loss_scale_stays_and_applies_every_step(gradients):
    loss_scale = FixedLossScale(8)
    assert loss_scale.update(gradients) == (None, True)
    assert loss_scale() == 8.0


FINITE = {
    "finite": [1.0, 2.0],
    "none_beside_finite": [None, 1.0],
    "tensor": tf.constant([1.0, 2.0]),
}
NOT_FINITE = {
    "inf": [1.0, float("inf")],
    "minus_inf": [float("-inf")],
    "nan": [float("nan"), 1.0],
    "none_beside_inf": [None, float("inf")],
    "nest": {"a": [1.0], "b": (2.0, float("nan"))},
    "float16": [tf.constant([1.0, float("inf")], "float16")],
    "slices": [tf.IndexedSlices(tf.constant([[float("nan")]]), tf.constant([0]))],
}


@pytest.mark.parametrize("name", [*FINITE, *NOT_FINITE])
def test_update_of_a_dynamic_loss_scale_says_whether_to_apply(stepped, name):
    loss_scale, results = DynamicLossScale(8, increment_period=5), []

    def step():
        nothing, should_apply = loss_scale.update({**FINITE, **NOT_FINITE}[name])
        results.append(nothing)
        return should_apply

    should_apply = stepped(step)()
    # A tf.function that makes variables is traced twice.
    assert set(results) == {None}
    assert tf.is_tensor(should_apply)
    assert (should_apply.dtype, should_apply.shape) == (tf.bool, ())
    assert bool(should_apply) is (name in FINITE)
    assert _state(loss_scale) == ((8.0, 1) if name in FINITE else (4.0, 0))


@pytest.mark.parametrize(
    ("loss_scale", "config"),
    [
        (FixedLossScale(8), {"loss_scale_value": 8.0}),
        (
            DynamicLossScale(),
            {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2.0},
        ),
        (
            DynamicLossScale(8, 3, 4),
            {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0},
        ),
    ],
    ids=["fixed", "defaults", "dynamic"],
)
def test_a_configuration_has_the_settings_and_makes_the_same_again(loss_scale, config):
    again = type(loss_scale).from_config(json.loads(json.dumps(config)))
    assert type(again) is type(loss_scale)
    assert again() == next(iter(config.values()))
    # The settings, not the state.
    loss_scale.update(_BAD)
    for one in (loss_scale, again):
        assert one.get_config() == config
        if isinstance(one, DynamicLossScale):
            assert {name: getattr(one, name) for name in config} == config
            settings = ", ".join(f"{name}={value}" for name, value in config.items())
            assert repr(one) == f"DynamicLossScale({settings})"
        else:
            assert repr(one) == "FixedLossScale(8.0)"


WRONG = [
    (FixedLossScale, (), "loss_scale_value", (0, -1, float("inf"), float("nan"), "8", True, None)),
    (DynamicLossScale, (), "initial_loss_scale", (0, -1, float("inf"), float("nan"), "8")),
    (DynamicLossScale, (8,), "increment_period", (0, -1, 2.5, "3")),
    (DynamicLossScale, (8, 2), "multiplier", (0, 0.5, 1, -2, float("inf"), "2")),
]


@pytest.mark.parametrize(("cls", "before", "name", "values"), WRONG)
def test_values_that_cannot_be_used_are_value_errors_that_name_them(cls, before, name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            cls(*before, value)


def test_a_second_weight_of_one_name_is_an_error():
    loss_scale = Halving(8.0)
    with pytest.raises(ValueError, match=r"already has a weight of this name. Received: 'scale'"):
        loss_scale._add_weight("scale", 1.0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@TWO_KINDS
def test_a_copy_of_a_loss_scale_is_refused_with_the_line_that_makes_another(make, copied):
    loss_scale = make()
    with pytest.raises(UnsupportedError, match=r"from_config\(old\.get_config\(\)\)"):
        copied(loss_scale)
    again = type(loss_scale).from_config(loss_scale.get_config())
    assert (type(again), again.get_config()) == (type(loss_scale), loss_scale.get_config())
    loss_scale.update([tf.constant(1.0)])
    assert again() == 8.0


@pytest.mark.parametrize(
    "value", [None, "static", "8", True, 0, -8, float("inf"), float("nan"), object(), [8]]
)
def test_something_that_is_no_loss_scale_is_refused(value):
    inner = sgd()
    with pytest.raises(ValueError, match="loss_scale"):
        experimental.LossScaleOptimizer(inner, value)
    experimental.LossScaleOptimizer(inner, 8)


class OnlySmall(DynamicLossScale):
    """A known one, whose way to move is rewritten: it refuses gradients above 4."""

    def update(self, grads):
        nothing, finite = super().update(grads)
        return nothing, finite & (tf.abs(grads[0]) <= 4.0)


@pytest.mark.parametrize(
    ("make", "factors", "states", "skipped"),
    [
        (Halving, (1.0, 5.0, 1.0), [(4.0, 0.75), (4.0, 0.75), (2.0, 0.5)], 1),
        (OnlySmall, (1.0, 5.0, float("nan")), [(8.0, 0.75), (16.0, 0.75), (8.0, 0.75)], 2),
    ],
)
def test_a_loss_scale_of_ones_own_drives_the_optimizer(stepped, make, factors, states, skipped):
    loss_scale = make(8.0, 2)
    var = tf.Variable(1.0)
    optimizer = experimental.LossScaleOptimizer(sgd(0.25), loss_scale)
    step = stepped(lambda factor: optimizer.minimize(lambda: factor * var, [var]))
    seen = []
    for factor in factors:
        step(tf.constant(factor))
        seen.append((float(loss_scale()), float(var.numpy())))
    # Its verdict, though a gradient of 5 is finite.
    assert seen == states
    assert (optimizer.iterations, optimizer.steps_skipped) == (3, skipped)
    assert optimizer.inner_optimizer.iterations == 3 - skipped
    own = {id(v) for v in loss_scale._variables().values()}
    ids = [id(v) for v in optimizer.variables]
    assert len(ids) == len(set(ids))
    assert own <= set(ids)
    assert not own & {id(v) for v in optimizer.weights}


def test_a_configuration_with_a_loss_scale_of_ones_own_needs_custom_objects():
    config = experimental.LossScaleOptimizer(sgd(), Halving(8.0, lowest=2.0)).get_config()
    assert config["loss_scale"] == {
        "class_name": "Halving",
        "config": {"start": 8.0, "lowest": 2.0},
    }
    with pytest.raises(ValueError, match="custom_objects"):
        experimental.LossScaleOptimizer.from_config(config)
    again = experimental.LossScaleOptimizer.from_config(config, custom_objects={"Halving": Halving})
    assert isinstance(again.loss_scale, Halving)
    assert again.loss_scale.get_config() == {"start": 8.0, "lowest": 2.0}


def test_the_current_class_reads_configurations_of_this_one_and_not_the_other_way():
    current = lossscale.LossScaleOptimizer(sgd(0.25), initial_scale=8, dynamic_growth_steps=3)
    older = experimental.LossScaleOptimizer(sgd(0.25), DynamicLossScale(8, 3))
    back = lossscale.LossScaleOptimizer.from_config(older.get_config())
    assert back.rule == current.rule
    with pytest.raises(ValueError, match=r"call lossscale\.LossScaleOptimizer\.from_config"):
        experimental.LossScaleOptimizer.from_config(current.get_config())


@pytest.mark.parametrize(
    ("loss_scale", "custom_objects", "batches", "scale"),
    [
        pytest.param(DynamicLossScale(8, 3), {}, "good good good bad good", 8.0, id="dynamic"),
        pytest.param(Halving(64.0), {"Halving": Halving}, "good good good bad good", 4.0, id="own"),
        pytest.param(FixedLossScale(3), {}, "good good", 3.0, id="fixed"),
    ],
)
def test_a_model_that_was_saved_goes_on_as_if_it_had_not_been(
    tmp_path, loss_scale, custom_objects, batches, scale
):
    seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    optimizer = experimental.LossScaleOptimizer(sgd(0.125, momentum=0.5), loss_scale)
    model.compile(optimizer, "mse", run_eagerly=True)
    inputs, wanted = np.arange(12, dtype="float32").reshape(4, 3) / 12, np.ones((4, 2))
    for batch in batches.split():
        model.train_on_batch(inputs if batch == "good" else np.full_like(inputs, np.inf), wanted)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=custom_objects)
    assert isinstance(loaded.optimizer, experimental.LossScaleOptimizer)
    assert type(loaded.optimizer.loss_scale) is type(loss_scale)
    for one in (model.optimizer, loaded.optimizer):
        assert one.loss_scale() == scale
        assert one.iterations == len(batches.split())
        assert one.steps_skipped == batches.count("bad")
    assert_same(everything(model.optimizer), everything(loaded.optimizer))
    for one in (model, loaded):
        one.train_on_batch(inputs, wanted)
    assert_same(everything(model.optimizer), everything(loaded.optimizer))
    assert_same(model.get_weights(), loaded.get_weights())

"""Files of both Kerases: what is held within is saved, what is wrong is refused or mended."""

import contextlib
import copy
import importlib
import itertools
import re

import numpy as np
import pytest

import lossscale
from conformance.wrappers import BACKEND, KERAS

if KERAS == "none":
    pytest.skip("about the files of Keras", allow_module_level=True)

from held_optimizers import holding, optimizers_in, other
from kerases import INF, NAN, assert_same, status, values

keras = importlib.import_module(KERAS)
if KERAS == "keras":
    KERAS_OWN = keras.optimizers.LossScaleOptimizer
else:
    KERAS_OWN = keras.mixed_precision.LossScaleOptimizer


def wrapped(inner, **arguments):
    return lossscale.LossScaleOptimizer(inner, **(arguments or {"initial_scale": 2.0**10}))


def plain(inner):
    return inner


def model_with(optimizer):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", run_eagerly=BACKEND == "tensorflow", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def filled(optimizer):
    """Gives each variable of an optimizer another number; returns their arrays."""
    arrays = values(optimizer.variables)
    for number, (variable, array) in enumerate(zip(optimizer.variables, arrays, strict=True)):
        variable.assign(np.full(array.shape, number + 2.0).astype(array.dtype))
    return values(optimizer.variables)


ATTRIBUTES = {
    "an optimizer": None,
    "a list": lambda: [other(keras), other(keras)],
    "a dictionary": lambda: {"first": other(keras)},
}
NAMES = ("base", "_base", "momentum_of_mine")
# Attributes of the wrapper have these names.
OURS = ("_optimizer", "inner_optimizer", "loss_scale_state", "loss_scale", "rule", "_state")
WAYS = (*itertools.product((wrapped, plain), repeat=2), (KERAS_OWN, wrapped))


# Each kind with each name and each way, in a third of all that three lists can be combined to.
@pytest.mark.parametrize(
    ("kind", "name", "writes", "reads"),
    [
        (list(ATTRIBUTES)[(i + j) % 3], name, *way)
        for i, name in enumerate(NAMES + OURS)
        for j, way in enumerate(WAYS)
    ],
)
def test_weights_have_the_optimizers_that_an_inner_optimizer_holds(
    tmp_path, kind, name, writes, reads
):
    if (KERAS, writes, name) == ("tf_keras", KERAS_OWN, "loss_scale"):
        pytest.skip("its own class refuses this name")
    path, found = str(tmp_path / "a.weights.h5"), []
    for wrap in (writes, reads):
        inner = holding(keras, name, ATTRIBUTES[kind])
        model, parts = model_with(wrap(inner)), [inner, *optimizers_in(getattr(inner, name))]
        if not found:
            found.append([filled(part) for part in parts])
            model.save_weights(path)
        else:
            model.load_weights(path)
            found.append([values(part.variables) for part in parts])
    for written, read in zip(*found, strict=True):
        assert_same(written, read)


@pytest.mark.parametrize("built", [False, True], ids=["before build", "after build"])
def test_a_damaged_file_is_refused_before_a_change(built):
    model, store = model_with(wrapped(other(keras))), {}
    filled(model.optimizer.inner_optimizer)
    model.optimizer.save_own_variables(store)
    read = wrapped(other(keras))
    before = status(read)
    if built:
        read.build(model.trainable_variables)
    held = values(read.inner_optimizer.variables)
    del store["0"]
    with pytest.raises(ValueError, match="damaged: it has no array '0'"):
        read.load_own_variables(store)
    assert status(read) == before
    assert_same(values(read.inner_optimizer.variables), held)


def step(optimizer, variables, factor):
    loss = sum if KERAS == "keras" else keras.backend.sum
    optimizer.minimize(lambda: loss([each * factor for each in variables]), variables)


@pytest.mark.parametrize("built", [False, True], ids=["before build", "after build"])
def test_state_that_does_not_fit_leaves_the_optimizer_as_it_was(built):
    def made(count):
        new = keras.Variable if KERAS == "keras" else importlib.import_module("tensorflow").Variable
        return wrapped(keras.optimizers.Adam(0.1)), [new(1.0) for _ in range(count)]

    def load(optimizer, written):
        # In the order of a file.
        for place in (lambda each: each, lambda each: each.loss_scale_state):
            store = {}
            place(written).save_own_variables(store)
            arrays = {name: np.array(value) for name, value in store.items()}
            place(optimizer).load_own_variables(arrays)

    def load_and_step(optimizer, variables, written):
        load(optimizer, written)
        assert not built or status(optimizer) == before
        step(optimizer, variables, 2.0)

    (long, two), (short, one), (read, mine), (fresh, own) = map(made, (2, 1, 1, 1))
    for factor in (1.0, INF, 0.5):
        step(long, two, factor)
        step(short, one, factor)
    before = status(read)
    if built:
        read.build(mine)
        fresh.build(own)
    with pytest.warns(UserWarning, match=r"Skipping variable loading|optimizer is not used"):
        load_and_step(read, mine, long)
    step(fresh, own, 2.0)
    assert status(read) == status(fresh)
    assert_same(values(read.variables), values(fresh.variables))
    # What fits is loaded afterwards as ever.
    load(read, short)
    assert status(read) == status(short)
    assert_same(values(read.variables), values(short.variables))


def test_an_own_number_of_another_shape_is_refused_before_a_change():
    optimizer, store = wrapped(other(keras)), {}
    optimizer.loss_scale_state.save_own_variables(store)
    before = status(optimizer)
    (scale,) = [name for name, value in store.items() if value == 2.0**10]
    store = {**store, scale: np.float32(16.0), "steps_skipped": np.ones(4)}
    with pytest.raises(ValueError, match="Nothing was changed"):
        optimizer.loss_scale_state.load_own_variables(store)
    assert status(optimizer) == before


def test_an_object_that_is_saved_stays_the_same_one():
    # Keras skips an object with the id of one that it has visited, also if that one is gone.
    optimizer = wrapped(holding(keras, "base"))
    found = {name: getattr(optimizer, name, None) for name in dir(optimizer)}
    saved = [name for name, each in found.items() if isinstance(each, keras.losses.Loss)]
    assert len(saved) == 2
    assert all(getattr(optimizer, name) is found[name] for name in saved)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        *((wrong, 8.0) for wrong in (INF, NAN, 0.0, -8.0)),
        (0.5, 1.0),
        # Too large for the largest scale of the code.
        (1024.0, 64.0),
        (2.0**127, 64.0),
    ],
)
def test_a_saved_scale_that_cannot_be_used_is_replaced_with_a_warning(saved, expected):
    rule = lossscale.DynamicScale(8.0, max_scale=64.0)
    optimizer, store = wrapped(other(keras), rule=rule), {}
    optimizer.loss_scale_state.save_own_variables(store)
    (scale,) = [name for name, value in store.items() if value == 8.0]
    with pytest.warns(lossscale.LossScaleWarning, match=re.escape(f"saved loss scale, {saved},")):
        optimizer.loss_scale_state.load_own_variables({**store, scale: np.float32(saved)})
    assert status(optimizer).scale == expected


FAMILIES = [keras.optimizers, *([keras.optimizers.legacy] if KERAS == "tf_keras" else [])]


@pytest.mark.parametrize("optimizers", FAMILIES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"dynamic": False, "initial_scale": 4, "name": "named"},
        {"initial_scale": 8, "dynamic_growth_steps": 3},
        {"rule": lossscale.DynamicScale(max_scale=64, initial_scale=2)},
        {"rule": lossscale.FixedScale(4, skip_nonfinite=True)},
    ],
    ids=str,
)
def test_a_configuration_makes_the_same_optimizer(optimizers, arguments):
    optimizer = wrapped(optimizers.Adam(0.5, beta_1=0.75), **arguments)
    described = keras.optimizers.serialize(optimizer)
    before = copy.deepcopy(described)
    for again in (
        keras.optimizers.deserialize(copy.deepcopy(described)),
        type(optimizer).from_config(described["config"]),
        lossscale.LossScaleOptimizer.from_config(described["config"]),
    ):
        assert type(again) is type(optimizer)
        assert (again.rule, again.name) == (optimizer.rule, optimizer.name)
        assert again.get_config() == optimizer.get_config()
    assert described == before


# --- Of Keras 3 alone: attributes of a wrapper's own, and weights of other shapes ----------------

on_keras_3 = pytest.mark.skipif(KERAS == "tf_keras", reason="tf_keras saves them otherwise")


class Holding(type(wrapped(other(keras)))):
    """A wrapper with an attribute of its own that Keras saves."""

    def __init__(self, inner):
        super().__init__(inner)
        self.extra = other(keras)


@on_keras_3
@pytest.mark.parametrize("reads", [Holding, plain])
def test_attributes_of_one_name_of_both_optimizers_are_saved(tmp_path, reads):
    path, found = str(tmp_path / "a.weights.h5"), []
    for wrap in (Holding, reads):
        inner = holding(keras, "extra")
        model = model_with(wrap(inner))
        parts = [inner.extra, model.optimizer.extra]
        parts[1].build([])
        if not found:
            found += [filled(part) for part in parts]
            model.save_weights(path)
        else:
            model.load_weights(path)
            found += [values(part.variables) for part in parts]
    assert_same(found[0], found[2])
    if reads is Holding:
        assert_same(found[1], found[3])


@on_keras_3
@pytest.mark.parametrize("built", [False, True], ids=["before build", "after build"])
def test_weights_of_other_shapes_are_refused_as_a_whole(built):
    def variables(count):
        shapes = (2, 3), (count,)
        return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]

    first = wrapped(keras.optimizers.Adam(0.01))
    first.build(variables(2))
    filled(first.inner_optimizer)
    store, own = {}, {}
    first.save_own_variables(store)
    first.loss_scale_state.save_own_variables(own)
    own["dynamic_scale"] = np.float32(4.0)
    targets = variables(5)
    second = wrapped(keras.optimizers.Adam(0.01))
    before = status(second)
    if built:
        second.build(targets)
        with pytest.raises(ValueError, match="Nothing was changed"):
            second.load_own_variables(store)
    else:
        second.load_own_variables(store)
    # `skip_mismatch` goes on here.
    second.loss_scale_state.load_own_variables(own)
    if not built:
        with pytest.warns(UserWarning, match="state of the optimizer is not used"):
            second.build(targets)
    assert status(second) == before
    assert not any(array.any() for array in values(second.inner_optimizer._momentums))


@on_keras_3
def test_variables_of_one_name_are_saved_beside_one_another():
    def made():
        optimizer = wrapped(keras.optimizers.SGD(0.1))
        for number, name in enumerate(("steps_skipped", "iteration", "mine", "mine")):
            own = keras.Variable(0.0, name=name, trainable=False)
            setattr(optimizer, f"own_{number}", own)
        return optimizer

    written, read = made(), made()
    for number in range(4):
        getattr(written, f"own_{number}").assign(number + 1.0)
    store = {}
    written.loss_scale_state.save_own_variables(store)
    read.loss_scale_state.load_own_variables(store)
    assert [float(getattr(read, f"own_{number}")) for number in range(4)] == [1, 2, 3, 4]
    assert status(read) == status(written)


class Dies(keras.callbacks.Callback):
    """Ends a run at the start of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.last = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.last:
            raise InterruptedError


def test_a_run_that_died_goes_on_from_its_backup(tmp_path):
    def trained(folder, dies_in_epoch=None):
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.set_weights([np.ones((4, 1)), np.zeros(1)])
        eager = BACKEND == "tensorflow"
        model.compile(wrapped(keras.optimizers.Adam(0.1)), "mse", run_eagerly=eager)
        x = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
        x[9] = NAN
        callbacks = [keras.callbacks.BackupAndRestore(str(tmp_path / folder)), Dies(dies_in_epoch)]
        with contextlib.suppress(InterruptedError):
            model.fit(x, x[:, 0], 4, 4, shuffle=False, verbose=0, callbacks=callbacks)
        return status(model.optimizer), [each.tolist() for each in model.get_weights()]

    whole = trained("whole")
    assert whole[0].skipped == 4
    assert trained("killed", 2)[0].iterations == 8
    assert trained("killed") == whole

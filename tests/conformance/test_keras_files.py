"""Files of both Kerases: what is held within is saved, what is wrong is refused or mended."""

import contextlib
import copy
import importlib
import pickle
import re
import warnings

import h5py
import numpy as np
import pytest

import lossscale
from conformance.wrappers import BACKEND, KERAS

if KERAS == "none":
    pytest.skip("about the files of Keras", allow_module_level=True)

from held_optimizers import holding, optimizers_in, other
from kerases import INF, NAN, assert_same, status, values
from lossscale.keras_common import saving

keras = importlib.import_module(KERAS)
if KERAS == "keras":
    KERAS_OWN = keras.optimizers.LossScaleOptimizer
else:
    KERAS_OWN = keras.mixed_precision.LossScaleOptimizer


def wrapped(inner, **arguments):
    return lossscale.LossScaleOptimizer(inner, **(arguments or {"initial_scale": 2.0**10}))


def variable(value):
    new = keras.Variable if KERAS == "keras" else importlib.import_module("tensorflow").Variable
    return new(value)


def step(optimizer, variables, factor):
    loss = sum if KERAS == "keras" else keras.backend.sum
    optimizer.minimize(lambda: loss([each * factor for each in variables]), variables)


def a_model(optimizer):
    """A compiled model that was never trained, so that its optimizer may not be built."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", run_eagerly=BACKEND == "tensorflow", jit_compile=False)
    return model


def built(model):
    model.optimizer.build(model.trainable_variables)
    return model


def model_with(optimizer):
    return built(a_model(optimizer))


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
OURS = ("_optimizer", "inner_optimizer", "loss_scale", "rule", "_state")


# Each kind with each name, in a third of all that three lists can be combined to.
@pytest.mark.parametrize(
    ("kind", "name", "writes"),
    [
        (list(ATTRIBUTES)[(i + j) % 3], name, writes)
        for i, name in enumerate(NAMES + OURS)
        for j, writes in enumerate((wrapped, KERAS_OWN))
    ],
)
def test_weights_have_the_optimizers_that_an_inner_optimizer_holds(tmp_path, kind, name, writes):
    if (KERAS, writes, name) == ("tf_keras", KERAS_OWN, "loss_scale"):
        pytest.skip("its own class refuses this name")
    path, found = str(tmp_path / "a.weights.h5"), []
    for wrap in (writes, wrapped):
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


# --- All of an optimizer is loaded, or nothing ---------------------------------------------------


def adam(**settings):
    return keras.optimizers.Adam(0.1, **settings)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.5)


def frozen(model):
    """A model that trains its bias alone; its arrays are as many with Adam as with SGD before."""
    variables = [each for each in model.trainable_variables if len(each.shape) == 1]
    model.optimizer.build(variables)
    return model


# What saves, what loads, and how its optimizer is built.
MISFITS = {
    "not built": (lambda: wrapped(adam()), adam, lambda model: model),
    "an optimizer without loss scaling": (adam, adam, built),
    "no optimizer": (None, adam, built),
    "more arrays": (lambda: wrapped(adam(amsgrad=True)), adam, built),
    "fewer arrays": (lambda: wrapped(momentum()), adam, built),
    "other variables": (lambda: wrapped(adam()), adam, frozen),
    "as many arrays of other shapes": (lambda: wrapped(momentum()), adam, frozen),
    "arrays that its own class leaves out": (
        lambda: KERAS_OWN(keras.optimizers.Nadam(0.1)),
        lambda: keras.optimizers.Nadam(0.1),
        built,
    ),
    "another class with the same shapes": (
        lambda: wrapped(keras.optimizers.AdamW(0.1)),
        lambda: type("MyAdam", (keras.optimizers.Adam,), {})(0.1),
        built,
    ),
    "several optimizers": (lambda: wrapped(holding(keras, "base")), adam, built),
}


@pytest.mark.parametrize("case", MISFITS)
def test_layers_are_loaded_and_one_warning_says_what_to_write_for_the_optimizer(tmp_path, case):
    saves, inner, prepared = MISFITS[case]
    path = str(tmp_path / "a.weights.h5")
    if saves is None:
        saved = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    else:
        saved = model_with(saves())
        inside = getattr(saved.optimizer, "inner_optimizer", saved.optimizer)
        for each in (inside, *vars(inside).values()):
            if isinstance(each, keras.optimizers.Optimizer):
                filled(each)
    saved.save_weights(path)
    model = prepared(a_model(wrapped(inner())))
    optimizer = model.optimizer
    held = getattr(optimizer.inner_optimizer, "base", optimizer.inner_optimizer)
    optimizer.iterations = 5
    before = status(optimizer), values(optimizer.variables), values(held.variables)
    with warnings.catch_warnings(record=True, action="always") as caught:
        model.load_weights(path)
    [warning] = caught
    assert issubclass(warning.category, lossscale.LossScaleWarning)
    for words in ("optimizer.build(model.train", "`optimizer.inner_opt", "lossscale_migration"):
        assert words in str(warning.message)
    assert_same(model.get_weights(), saved.get_weights())
    assert status(optimizer) == before[0]
    assert_same(values(optimizer.variables), before[1])
    assert_same(values(held.variables), before[2])
    # What is saved now is all of it, and what fits is loaded as ever.
    model.save_weights(path)
    with h5py.File(path) as file:
        assert "inner_optimizer" in file["optimizer"]
    if prepared is not frozen:
        fits = model_with(wrapped(inner()))
        filled(fits.optimizer)
        fits.save_weights(path)
        built(model).load_weights(path)
        assert_same(values(optimizer.variables), values(fits.optimizer.variables))


ADAM, ADAMW = keras.optimizers.Adam, keras.optimizers.AdamW


class MyAdam(ADAM):
    pass


@pytest.mark.parametrize(
    ("saves", "loads", "names_class", "fits"),
    [
        (ADAM, MyAdam, True, True),
        (MyAdam, ADAM, True, True),
        (ADAM, ADAMW, True, False),
        (MyAdam, keras.optimizers.Adamax, True, False),
        (ADAM, ADAMW, False, True),
    ],
)
def test_a_file_names_the_class_of_the_library(tmp_path, saves, loads, names_class, fits):
    path, saved = str(tmp_path / "a.weights.h5"), model_with(wrapped(saves(0.1)))
    filled(saved.optimizer)
    expected = values(saved.optimizer.inner_optimizer.variables)
    saved.save_weights(path)
    with h5py.File(path, "r+") as file:
        if not names_class:
            # As files of users' own classes are, and of other releases.
            file["optimizer/vars"].pop("inner_class", None)
    model = model_with(wrapped(loads(0.1)))
    before = values(model.optimizer.variables)
    with contextlib.ExitStack() as stack:
        if not fits:
            words = rf"arrays of {ADAM.__name__}, {loads.__name__} has \d+\. .*set `trainable`"
            stack.enter_context(pytest.warns(lossscale.LossScaleWarning, match=words))
        model.load_weights(path)
    if fits:
        assert_same(values(model.optimizer.inner_optimizer.variables), expected)
    else:
        assert_same(values(model.optimizer.variables), before)


def test_a_class_of_users_own_has_no_name_of_the_library():
    own = type("Own", (keras.optimizers.Optimizer,), {})
    settings = {"name": "own"} if KERAS == "tf_keras" else {"learning_rate": 0.1}
    assert saving._class_of(own(**settings)) == ""


def test_the_warning_shows_how_to_load_the_file_of_an_optimizer_without_loss_scaling(tmp_path):
    path, saved = str(tmp_path / "a.weights.h5"), model_with(adam())
    expected = filled(saved.optimizer)
    saved.save_weights(path)
    optimizer = wrapped(adam())
    model = built(a_model(optimizer.inner_optimizer))
    model.load_weights(path)
    model.compile(optimizer, "mse")
    assert_same(values(optimizer.inner_optimizer.variables), expected)
    assert status(optimizer).iterations == status(optimizer).applied == 2


def test_a_number_of_another_shape_is_refused_before_a_change():
    optimizer, store = wrapped(other(keras)), {}
    optimizer.save_own_variables(store)
    before = status(optimizer)
    (scale,) = [name for name, value in store.items() if np.shape(value) == () and value == 2.0**10]
    store = {**store, scale: np.float32(16.0), "steps_skipped": np.ones(4)}
    with pytest.warns(lossscale.LossScaleWarning, match="keeps its state"):
        optimizer.load_own_variables(store)
    assert status(optimizer) == before


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
    optimizer.save_own_variables(store)
    (scale,) = [name for name, value in store.items() if np.shape(value) == () and value == 8.0]
    with pytest.warns(lossscale.LossScaleWarning, match=re.escape(f"saved loss scale, {saved},")):
        optimizer.load_own_variables({**store, scale: np.float32(saved)})
    assert status(optimizer).scale == expected


# --- Copies and configurations -------------------------------------------------------------------

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


OPTIMIZERS = {
    "current": lambda family: wrapped(family.Adam(0.1)),
    # In tf_keras one variable of it is in no list.
    "Nadam": lambda family: wrapped(family.Nadam(0.1)),
    "of TensorFlow 2.0": lambda family: lossscale.experimental.LossScaleOptimizer(
        family.Adam(0.1), lossscale.experimental.DynamicLossScale(2**10, 3)
    ),
}
COPIES = [copy.copy, copy.deepcopy, pickle.dumps]


def numbers_of(optimizer):
    """The loss scale and the counts, also of an optimizer of TensorFlow 2.0."""
    scale, skipped = optimizer._current_scale(), optimizer.steps_skipped
    last, steps = optimizer.last_step_skipped, optimizer.iterations
    return float(scale), int(skipped), bool(last), int(steps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_is_refused_with_three_lines_that_work(tmp_path, kind, family):
    old, variables = OPTIMIZERS[kind](family), [variable(1.0), variable(2.0)]
    if family is not keras.optimizers:
        # The slots of legacy optimizers are in the order in which they met their variables.
        step(old, variables[1:], 0.5)
    for factor in (0.5, INF, 1.0, NAN):
        step(old, variables, factor)
    for way in COPIES:
        with pytest.raises(lossscale.errors.UnsupportedError, match="cannot be copied") as error:
            way(old)
    _, *lines = str(error.value).splitlines()
    assert len(lines) == 3
    given = {"old": old, "variables": variables, "keras": keras, "path": str(tmp_path / "copy")}
    if KERAS == "tf_keras":
        given["tf"] = importlib.import_module("tensorflow")
    for line in lines:
        exec(line.strip(), given)
    new = given["new"]
    assert numbers_of(new) == numbers_of(old)
    assert numbers_of(new)[:3] == (2.0**8, 2, True)
    start, ends = values(variables), []
    for each in (old, new):
        for target, value in zip(variables, start, strict=True):
            target.assign(value)
        step(each, variables, 0.25)
        step(each, variables, 0.5)
        ends.append([*values(variables), *numbers_of(each)])
    assert_same(*ends)


# --- Of Keras 3 alone: variables of a wrapper's own ----------------------------------------------

on_keras_3 = pytest.mark.skipif(KERAS == "tf_keras", reason="tf_keras saves them otherwise")


@on_keras_3
def test_variables_of_one_name_are_saved_beside_one_another():
    def made():
        optimizer = wrapped(keras.optimizers.SGD(0.1))
        for number, name in enumerate(("steps_skipped", "iteration", "mine", "mine", "mine")):
            own = keras.Variable(0.0, name=name, trainable=False)
            setattr(optimizer, f"own_{number}", own)
        return optimizer

    written, read = made(), made()
    for number in range(5):
        getattr(written, f"own_{number}").assign(number + 1.0)
    store = {}
    written.save_own_variables(store)
    read.load_own_variables(store)
    assert [float(getattr(read, f"own_{number}")) for number in range(5)] == [1, 2, 3, 4, 5]
    assert status(read) == status(written)


@on_keras_3
def test_a_file_has_the_inner_optimizer_as_keras_writes_it_and_named_numbers(tmp_path):
    for name, wrap in (("ours", wrapped), ("theirs", KERAS_OWN)):
        model_with(wrap(adam())).save_weights(tmp_path / f"{name}.weights.h5")
    ours, theirs = (
        h5py.File(tmp_path / f"{name}.weights.h5")["optimizer"] for name in ("ours", "theirs")
    )
    inner = "inner_optimizer/vars"
    assert set(ours[inner]) == set(theirs[inner]) == {str(number) for number in range(6)}
    numbers = {"dynamic_scale", "step_counter", "steps_skipped", "last_step_skipped"}
    assert set(ours["vars"]) == {*numbers, "inner_shapes", "inner_class"}


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

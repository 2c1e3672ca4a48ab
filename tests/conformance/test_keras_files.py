"""Files of both Kerases: all of an optimizer arrives, or nothing changes and a warning says why.

Each test is a table of what wrote a file, what reads it, in which form, and how the reader is
built. From one backend to another: backends/test_files.py; files of older releases:
frameworks/tf_keras/test_files.py.
"""

import contextlib
import copy
import functools
import gc
import importlib
import itertools
import math
import pathlib
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

from conformance.every_optimizer import makers, state_of
from conformance.harness import array, native
from kerases import INF, NAN, assert_same, number, status, values
from lossscale import DynamicScale, FixedScale

keras = importlib.import_module(KERAS)
tf = importlib.import_module("tensorflow") if BACKEND == "tensorflow" else None
IS_KERAS_3 = KERAS == "keras"
Own = (keras.optimizers if IS_KERAS_3 else keras.mixed_precision).LossScaleOptimizer
on_keras_3 = pytest.mark.skipif(not IS_KERAS_3, reason="tf_keras saves them otherwise")
on_tensorflow = pytest.mark.skipif(tf is None, reason="TensorFlow alone has its checkpoints")
pytestmark = pytest.mark.usefixtures("compiled_quickly")

MAKERS = makers()
# Its scale and all of its counts change within a few steps.
RULE = DynamicScale(2.0**10, growth_interval=3, overflows_before_backoff=2)


def ours(inner, **arguments):
    return lossscale.LossScaleOptimizer(inner, **(arguments or {"initial_scale": 2.0**10}))


def own(inner):
    """Keras' own class."""
    return Own(inner)


def plain(inner):
    return inner


def adam(**settings):
    return keras.optimizers.Adam(0.1, **settings)


def nadam():
    return keras.optimizers.Nadam(0.1)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.5)


def variable(value):
    return (keras.Variable if IS_KERAS_3 else tf.Variable)(value)


def a_model(optimizer):
    """A compiled model that was never trained, so that its optimizer may not be built."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", run_eagerly=BACKEND == "tensorflow", jit_compile=False)
    return model


def built(model):
    optimizer = model.optimizer
    # What the legacy optimizers of tf_keras call it.
    make = getattr(optimizer, "build", None) or optimizer._create_all_weights
    make(model.trainable_variables)
    return model


def model_with(optimizer):
    return built(a_model(optimizer))


def step(optimizer, variables, factor):
    """A step by the calls of any class; each element of a variable has another gradient."""
    shapes, one = [tuple(each.shape) for each in variables], np.float32(1)
    given = [np.linspace(1, 2, math.prod(s), dtype="f").reshape(s) * factor for s in shapes]
    if IS_KERAS_3:
        scale = optimizer.scale_loss(one)
        optimizer.apply([keras.ops.convert_to_tensor(each) * scale for each in given], variables)
        return
    given = [tf.constant(each) for each in given]
    if hasattr(optimizer, "get_scaled_loss"):
        scale = optimizer.get_scaled_loss(tf.constant(one))
        given = optimizer.get_unscaled_gradients([each * scale for each in given])
    optimizer.apply_gradients(zip(given, variables, strict=True))


def trained(model, factors=(0.5, INF, 1.0)):
    for factor in factors:
        step(model.optimizer, model.trainable_variables, factor)
    return model


def inner_of(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def filled(optimizer):
    """Gives each variable of the inner optimizer, and of those that it holds, another number."""
    for i, (place, each) in enumerate(state_of(inner_of(optimizer)).items()):
        # The files of tf_keras have no rate.
        if not place.endswith("_learning_rate"):
            each.assign(np.full(tuple(each.shape), i + 2).astype(array(each).dtype))


# --- The oracle -----------------------------------------------------------------------------------


def arrays_in(optimizer):
    """The inner optimizer's arrays by their places, whatever lists it keeps of them itself."""
    return {place: array(each) for place, each in state_of(inner_of(optimizer)).items()}


def numbers_in(optimizer):
    """What tells the state of loss scaling; of Keras' own class the scale and a count."""
    if isinstance(optimizer, lossscale.LossScaleOptimizer):
        return status(optimizer)
    names = ("dynamic_scale", "step_counter") if IS_KERAS_3 else ("loss_scale", "dynamic_counter")
    return [number(getattr(optimizer, name)) for name in names] if is_scaled(optimizer) else ()


def is_scaled(optimizer):
    return isinstance(optimizer, Own)


def assert_arrived(read, written):
    """Asserts that an optimizer has what another one wrote, as far as both have it."""
    assert_unchanged(arrays_in(read), arrays_in(written))
    for found, expected in zip(numbers_in(read), numbers_in(written), strict=False):
        assert found == expected


def everything(optimizer):
    """What must not change where nothing is loaded."""
    arrays = {**arrays_in(optimizer), **dict(enumerate(values(optimizer.variables)))}
    return {**arrays, **status(optimizer)._asdict()}


def assert_unchanged(found, before):
    assert list(found) == list(before)
    assert_same(found.values(), before.values())


# --- Every optimizer, in every form ---------------------------------------------------------------

WEIGHTS, CHECKPOINT = ".weights.h5", "checkpoint"
SAVED_MODEL, WEIGHTS_OF_TENSORFLOW = "SavedModel", "TensorFlow's weights"


def write(form, model, path):
    if form == CHECKPOINT:
        checkpoint_of(model).write(path)
    elif form == WEIGHTS_OF_TENSORFLOW:
        model.save_weights(path, save_format="tf")
    elif form == WEIGHTS:
        model.save_weights(path)
    else:
        model.save(path, **({"save_format": "tf"} if form == SAVED_MODEL else {}))


def read(form, path, new):
    """Returns what a file has: in a model of its own, or in the one that `new` makes."""
    if form == SAVED_MODEL:
        model = built(keras.models.load_model(path))
        variables = str(pathlib.Path(path, "variables", "variables"))
        tf.train.Checkpoint(model).read(variables).expect_partial()
        return model
    if form in (".keras", ".h5"):
        return built(keras.models.load_model(path))
    model = new()
    if form == CHECKPOINT:
        checkpoint_of(model).read(path).assert_existing_objects_matched()
    elif form == WEIGHTS_OF_TENSORFLOW:
        model.load_weights(path).expect_partial()
    else:
        model.load_weights(path)
    return model


def checkpoint_of(model):
    return checkpoint(model.optimizer, model.trainable_variables)


def checkpoint(optimizer, variables):
    named = {f"v{i}": native(each) for i, each in enumerate(variables)}
    return tf.train.Checkpoint(optimizer=optimizer, **named)


def forms_of(name):
    """The forms into which the framework itself writes an optimizer, the one to train on last."""
    # tf_keras writes no state of a legacy optimizer into these.
    forms = [] if name.startswith("legacy-") else [".keras", WEIGHTS]
    if not IS_KERAS_3:
        # Keras 3 loads no optimizer from it; lossscale-migration does, as its tests show.
        forms.append(".h5")
        if name.endswith("-Adam"):
            # They are as checkpoints are, and a SavedModel takes seconds.
            forms += [SAVED_MODEL, WEIGHTS_OF_TENSORFLOW]
    return [*forms, *([CHECKPOINT] if tf else [])]


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("name", MAKERS)
def test_a_file_brings_all_of_an_optimizer_back(name, tmp_path):
    saved = trained(model_with(ours(MAKERS[name](), rule=RULE)), (INF, INF, 0.5, INF))
    assert status(saved.optimizer)[:4] == (2.0**9, 0, 3, True)
    for form in forms_of(name):
        path = str(tmp_path / f"saved{form if form.startswith('.') else ''}")
        write(form, saved, path)
        loaded = read(form, path, lambda: model_with(ours(MAKERS[name](), rule=RULE)))
        assert type(loaded.optimizer) is type(saved.optimizer)
        assert loaded.optimizer.rule == RULE
        assert_same(saved.get_weights(), loaded.get_weights())
        if name.startswith("legacy-") and form == ".h5":
            # tf_keras writes the inner optimizer's weights there and nothing else.
            assert_same(*(arrays_in(each.optimizer).values() for each in (saved, loaded)))
            assert int(loaded.optimizer.steps_skipped) == 0
        else:
            assert_arrived(loaded.optimizer, saved.optimizer)
    # What holds the same trains on in the same way, whatever it came from: so the last of them.
    for model in (saved, loaded):
        trained(model, (INF, 0.25))
    assert_same(saved.get_weights(), loaded.get_weights())
    assert_arrived(loaded.optimizer, saved.optimizer)


@on_keras_3
def test_a_pickled_model_has_everything_and_lets_its_optimizer_go():
    model = trained(model_with(ours(adam(), rule=RULE)))
    loaded = pickle.loads(pickle.dumps(model))
    assert_arrived(loaded.optimizer, model.optimizer)
    inner = loaded.optimizer.inner_optimizer
    del loaded
    gc.collect()
    assert isinstance(ours(inner), lossscale.LossScaleOptimizer)


@pytest.mark.parametrize("form", [WEIGHTS, *([CHECKPOINT] if tf else [])])
@pytest.mark.parametrize("arguments", [{}, {"skip_nonfinite": True}])
def test_a_fixed_scale_in_the_code_wins_over_the_one_in_a_file(tmp_path, form, arguments):
    path = str(tmp_path / "a.weights.h5")
    # In tf_keras' checkpoints a fixed scale that skips nothing has one node less.
    old = FixedScale(128.0, **({} if IS_KERAS_3 else arguments))
    saved = trained(model_with(ours(adam(), rule=old)), (0.5, 1.0))
    write(form, saved, path)
    rule = FixedScale(4.0, **arguments)
    optimizer = read(form, path, lambda: model_with(ours(adam(), rule=rule))).optimizer
    assert float(optimizer.loss_scale) == 4.0
    assert status(optimizer)[1:] == status(saved.optimizer)[1:]
    assert_same(*(arrays_in(each).values() for each in (optimizer, saved.optimizer)))


# --- Files of weights: what else writes them, and what does not fit -------------------------------


def holding(name, make=momentum):
    """An optimizer that holds others as an attribute, which Keras saves beside its variables."""

    class Holding(keras.optimizers.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            setattr(self, name, make())

        def build(self, variables):
            super().build(variables)
            held = getattr(self, name)
            parts = list(held.values()) if isinstance(held, dict) else held
            for each in parts if isinstance(parts, list) else [parts]:
                each.build(variables)

    return Holding()


ATTRIBUTES = {
    "an optimizer": momentum,
    "a list": lambda: [momentum(), momentum()],
    "a dictionary": lambda: {"first": momentum()},
}
NAMES = ("base", "_base", "momentum_of_mine")
# Attributes of the wrapper have these names.
OURS = ("_optimizer", "inner_optimizer", "loss_scale", "rule", "_state")
# Each kind with each name, in a third of all that three lists can be combined to.
HOLDING = {
    f"{writes.__name__}, {kind} as {name}": (writes, functools.partial(holding, name, make))
    for i, name in enumerate(NAMES + OURS)
    for j, writes in enumerate((ours, own))
    for kind, make in [list(ATTRIBUTES.items())[(i + j) % 3]]
    # Its own class refuses this name.
    if (KERAS, writes, name) != ("tf_keras", own, "loss_scale")
}
ADAM, ADAMW = keras.optimizers.Adam, keras.optimizers.AdamW


class MyAdam(ADAM):
    pass


class OfUsers(keras.optimizers.Optimizer):
    """An optimizer with the arrays of an SGD, and of no class of Keras'."""

    def __init__(self):
        super().__init__(**({"learning_rate": 0.1} if IS_KERAS_3 else {"name": "own"}))
        if not IS_KERAS_3:
            self._learning_rate = self._build_learning_rate(0.1)

    def build(self, variables):
        if hasattr(self, "momentums"):
            return
        super().build(variables)
        add = self.add_variable_from_reference
        self.momentums = [add(each, "momentum") for each in variables]

    def update_step(self, *_):
        """Is not asked for what is saved."""


def of(made):
    return functools.partial(made, *([] if made is OfUsers else [0.1]))


# What writes, around what; and what is inside of ours, which reads.
FITS = {
    "its own class, Adam": (own, adam, adam),
    "its own class, SGD": (own, momentum, momentum),
    "a subclass reads": (ours, adam, of(MyAdam)),
    "a subclass writes": (ours, of(MyAdam), adam),
    "a class of users' writes": (ours, of(OfUsers), momentum),
    "a class of users' reads": (ours, momentum, of(OfUsers)),
    # As files of other releases are.
    "no class is named": (ours, adam, of(ADAMW)),
    **{case: (writes, inner, inner) for case, (writes, inner) in HOLDING.items()},
}


@pytest.mark.parametrize("case", FITS)
def test_weights_of_what_fits_bring_all_of_an_optimizer(tmp_path, case):
    writes, inner, inside = FITS[case]
    path = str(tmp_path / "a.weights.h5")
    saved = model_with(writes(inner()))
    if IS_KERAS_3:
        # On JAX its own class does not step eagerly.
        saved.optimizer.dynamic_scale.assign(2.0**12)
        saved.optimizer.step_counter.assign(2)
    else:
        trained(saved)
    filled(saved.optimizer)
    saved.save_weights(path)
    if case == "no class is named":
        with h5py.File(path, "r+") as file:
            del file["optimizer/vars/inner_class"]
    model = model_with(ours(inside()))
    before = status(model.optimizer)
    model.load_weights(path)
    written, read = saved.optimizer, model.optimizer
    assert_same(*(arrays_in(each).values() for each in (read, written)))
    if writes is ours:
        assert status(read) == status(written)
    else:
        assert status(read)[2:] == (0, False, *[number(inner_of(written).iterations)] * 2)
        # The files of tf_keras' own class have no scale.
        expected = numbers_in(written) if IS_KERAS_3 else before[:2]
        assert tuple(expected) != (2.0**15, 0)
        assert status(read)[:2] == tuple(expected)


def frozen(model):
    """A model that trains its bias alone; its arrays are as many with Adam as with SGD before."""
    variables = [each for each in model.trainable_variables if len(each.shape) == 1]
    model.optimizer.build(variables)
    return model


def several():
    """Several optimizers; their file has numbers of the same kinds as that of Keras' own class."""
    inside = keras.optimizers.OptimizerMap(momentum(), {"bias": momentum()})
    return keras.optimizers.MultiOptimizer(inside)


def another(loads):
    return rf"arrays of {ADAM.__name__}, {loads.__name__} has \d+\. .*set `trainable`"


# What saves, what is inside of ours, how that is built, and words of the warning.
MISFITS = {
    "not built": (lambda: ours(adam()), adam, lambda model: model, "arrays of Adam, Adam has"),
    "an optimizer without loss scaling": (adam, adam, built, "has no arrays"),
    "no optimizer": (None, adam, built, "has no arrays"),
    "more arrays": (lambda: ours(adam(amsgrad=True)), adam, built, "Adam has"),
    "fewer arrays": (lambda: ours(momentum()), adam, built, "arrays of SGD, Adam has"),
    "other variables": (lambda: ours(adam()), adam, frozen, "set `trainable`"),
    "as many arrays of other shapes": (lambda: ours(momentum()), adam, frozen, "arrays of SGD"),
    "arrays that its own class leaves out": (lambda: own(nadam()), nadam, built, "Nadam has"),
    "a subclass of another class, with the same shapes": (
        lambda: ours(of(ADAMW)()),
        of(MyAdam),
        built,
        "arrays of AdamW, MyAdam has",
    ),
    "another class with the same shapes": (lambda: ours(adam()), of(ADAMW), built, another(ADAMW)),
    "another class than that of a subclass": (
        lambda: ours(MyAdam(0.1)),
        of(keras.optimizers.Adamax),
        built,
        another(keras.optimizers.Adamax),
    ),
    "several held optimizers": (lambda: ours(holding("base")), adam, built, "arrays of SGD"),
    **({"several optimizers": (several, momentum, built, "has no arrays")} if IS_KERAS_3 else {}),
}


@pytest.mark.parametrize("case", MISFITS)
def test_layers_are_loaded_and_one_warning_says_what_to_write_for_the_optimizer(tmp_path, case):
    saves, inner, prepared, words = MISFITS[case]
    path = str(tmp_path / "a.weights.h5")
    saved = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    if saves is not None:
        saved = model_with(saves())
        filled(saved.optimizer)
    saved.save_weights(path)
    model = prepared(a_model(ours(inner())))
    optimizer = model.optimizer
    optimizer.iterations = 5
    before = everything(optimizer)
    with warnings.catch_warnings(record=True, action="always") as caught:
        model.load_weights(path)
    [warning] = caught
    assert issubclass(warning.category, lossscale.LossScaleWarning)
    for part in ("optimizer.build(model.train", "`optimizer.inner_opt", "lossscale_migration"):
        assert part in str(warning.message)
    assert re.search(words, str(warning.message))
    assert_same(model.get_weights(), saved.get_weights())
    assert_unchanged(everything(optimizer), before)
    # What is saved now is all of it, and what fits is loaded as ever.
    model.save_weights(path)
    with h5py.File(path) as file:
        assert "inner_optimizer" in file["optimizer"]
    if prepared is not frozen:
        fits = model_with(ours(inner()))
        filled(fits.optimizer)
        fits.save_weights(path)
        built(model).load_weights(path)
        assert_arrived(optimizer, fits.optimizer)


def test_the_warning_shows_how_to_load_the_file_of_an_optimizer_without_loss_scaling(tmp_path):
    path, saved = str(tmp_path / "a.weights.h5"), trained(model_with(adam()), (0.5, 1.0))
    saved.save_weights(path)
    optimizer = ours(adam())
    model = built(a_model(optimizer.inner_optimizer))
    model.load_weights(path)
    model.compile(optimizer, "mse")
    assert_arrived(optimizer, saved.optimizer)
    assert status(optimizer).iterations == status(optimizer).applied == 2


def written_numbers(optimizer):
    """What an optimizer writes of its own, and the name of the loss scale there."""
    store = {}
    optimizer.save_own_variables(store)
    scale = number(optimizer.loss_scale)
    (name,) = [each for each, value in store.items() if np.shape(value) == () and value == scale]
    return store, name


def test_a_number_of_another_shape_is_refused_before_a_change():
    optimizer = ours(momentum())
    store, scale = written_numbers(optimizer)
    before = status(optimizer)
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
    optimizer = ours(momentum(), rule=DynamicScale(8.0, max_scale=64.0))
    store, scale = written_numbers(optimizer)
    with pytest.warns(lossscale.LossScaleWarning, match=re.escape(f"saved loss scale, {saved},")):
        optimizer.load_own_variables({**store, scale: np.float32(saved)})
    assert status(optimizer).scale == expected


@on_keras_3
def test_variables_of_one_name_are_saved_beside_one_another():
    def made():
        optimizer = ours(keras.optimizers.SGD(0.1))
        for i, name in enumerate(("steps_skipped", "iteration", "mine", "mine", "mine")):
            setattr(optimizer, f"own_{i}", keras.Variable(0.0, name=name, trainable=False))
        return optimizer

    written, read = made(), made()
    for i in range(5):
        getattr(written, f"own_{i}").assign(i + 1.0)
    store = {}
    written.save_own_variables(store)
    read.load_own_variables(store)
    assert [float(getattr(read, f"own_{i}")) for i in range(5)] == [1, 2, 3, 4, 5]
    assert status(read) == status(written)


@on_keras_3
def test_a_file_has_the_inner_optimizer_as_keras_writes_it_and_named_numbers(tmp_path):
    for name, wrap in (("ours", ours), ("theirs", own)):
        model_with(wrap(adam())).save_weights(tmp_path / f"{name}.weights.h5")
    written, theirs = (
        h5py.File(tmp_path / f"{name}.weights.h5")["optimizer"] for name in ("ours", "theirs")
    )
    inner = "inner_optimizer/vars"
    assert set(written[inner]) == set(theirs[inner]) == {str(number) for number in range(6)}
    numbers = {"dynamic_scale", "step_counter", "steps_skipped", "last_step_skipped"}
    assert set(written["vars"]) == {*numbers, "inner_shapes", "inner_class"}


# --- Checkpoints of TensorFlow --------------------------------------------------------------------

CHILDREN = ("loss_scale", "base_optimizer", "lossscale")


def attribute(name, *, late=False):
    """A new optimizer of tf_keras with a variable as an attribute, which TensorFlow tracks."""

    class WithAttribute(keras.optimizers.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            if not late:
                setattr(self, name, tf.Variable(0.0))

        def build(self, var_list):
            super().build(var_list)
            if not hasattr(self, name):
                setattr(self, name, tf.Variable(0.0))

    return WithAttribute()


def tracked(name):
    """A legacy optimizer that tracks a variable under this name, as averaging ones do."""

    class Tracking(keras.optimizers.legacy.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            self.own = tf.Variable(0.0)
            self._track_trackable(self.own, name)

    return Tracking()


WRITERS = {"ours": ours, "own": own, "plain": plain, "the inner one of ours": ours}


def rows_of_checkpoints():
    """What is inside, what writes, what reads, and when the reader is built."""
    when = ("before", "by a step", "by a step in a function")
    if tf is None:
        return
    if IS_KERAS_3:
        # That of a plain optimizer is an error.
        rows = itertools.product((adam, nadam), ("ours", "own"), ("ours",), when)
        yield from ((f"{inner.__name__}", inner, *row) for inner, *row in rows)
        return
    kinds = {
        "new": attribute,
        "new, of build": functools.partial(attribute, late=True),
        "legacy": tracked,
    }
    ways = list(itertools.product(("ours", "own", "plain"), ("ours",), when))
    ways += itertools.product(("ours",), ("own", "plain"), when[:2])
    for kind in ("new", "legacy"):
        yield from ((kind, functools.partial(kinds[kind], "free"), *way) for way in ways)
    # An inner optimizer may have children of the names that loss scaling has in checkpoints. Each
    # kind goes each way, by one of the names; each name goes each way too.
    writers = ("ours", "plain", "the inner one of ours")
    ways = list(itertools.product(writers, ("ours", "plain"), when[:2]))
    for i, kind in enumerate(kinds):
        for j, way in enumerate(ways):
            # The name belongs to the loss scale as long as nothing else has it.
            is_late = kind == "new, of build" and way[0] != "ours" and way[1:] == ("ours", when[1])
            if not is_late:
                name = CHILDREN[(i + j) % len(CHILDREN)]
                yield f"{kind}, {name}", functools.partial(kinds[kind], name), *way


ROWS = [pytest.param(*row, id=", ".join([name, *row[1:]])) for name, *row in rows_of_checkpoints()]


@pytest.mark.parametrize(("inner", "writer", "reader", "when"), ROWS)
def test_checkpoints_bring_all_of_an_optimizer(tmp_path, inner, writer, reader, when):
    first, second = [variable([1.0, 2.0])], [variable([5.0, 6.0])]
    written, read = WRITERS[writer](inner()), WRITERS[reader](inner())
    for factor in (0.5, 1.0) if writer == "plain" else (0.5, INF, 1.0):
        step(written, first, factor)
    filled(written)
    saved = inner_of(written) if writer.startswith("the inner") else written
    path = checkpoint(saved, first).write(tmp_path / "a")
    if when == "before":
        step(read, second, 1.0)
    restored = checkpoint(read, second).read(path)

    def further():
        step(read, second, 0.25)

    if when != "before":
        # The state waits for the first step, and is restored once.
        further = tf.function(further) if when.endswith("function") else further
        for _ in range(2):
            further()
            step(written, first, 0.25)
    # Keras 3 makes new objects for some nodes when it builds.
    if IS_KERAS_3 or (is_scaled(read) and not is_scaled(saved)):
        restored.expect_partial()
    else:
        restored.assert_existing_objects_matched()
    assert_same(values(second), values(first))
    assert_arrived(read, saved)


on_tf_keras = pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 has other names in checkpoints")


@on_tf_keras
@pytest.mark.parametrize("make", [attribute, tracked])
def test_own_class_reads_the_scale_beside_a_child_named_base_optimizer(tmp_path, make):
    written, read = ours(make("base_optimizer"), initial_scale=64.0), own(make("free"))
    path = checkpoint(written, []).write(tmp_path / "a")
    checkpoint(read, []).read(path).expect_partial()
    assert float(read.loss_scale) == 64.0


@on_tf_keras
@pytest.mark.parametrize("make", [attribute, tracked])
def test_the_one_name_that_is_taken_is_refused(tmp_path, make):
    inner = make("free")
    optimizer = ours(inner)
    inner._track_trackable(tf.Variable(0.0), "lossscale.loss_scale")
    for use in (
        lambda: checkpoint(optimizer, []).write(tmp_path / "a"),
        lambda: ours(make("lossscale.loss_scale")),
    ):
        with pytest.raises(ValueError, match=r"tracks a .* as 'lossscale\.loss_scale'"):
            use()


on_keras_3_of_tensorflow = pytest.mark.skipif(
    not IS_KERAS_3 or tf is None, reason="about checkpoints of Keras 3"
)
BUILT = pytest.mark.parametrize("is_built", [True, False], ids=["built", "unbuilt"])


@on_keras_3_of_tensorflow
@BUILT
def test_a_checkpoint_of_an_optimizer_without_loss_scaling_is_an_error(tmp_path, is_built):
    saved, optimizer = trained(model_with(adam()), (0.5, 1.0)), ours(adam())
    path = tf.train.Checkpoint(optimizer=saved.optimizer).write(tmp_path / "a")
    if is_built:
        optimizer.build(saved.trainable_variables)
    before = everything(optimizer)
    line = "tf.train.Checkpoint(optimizer=optimizer.inner_optimizer)"
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        tf.train.Checkpoint(optimizer=optimizer).read(path).expect_partial()
    assert isinstance(error.value, lossscale.LossScaleError)
    assert_unchanged(everything(optimizer), before)
    # What the error says works.
    eval(line, {"tf": tf, "optimizer": optimizer}).read(path).expect_partial()
    optimizer.build(saved.trainable_variables)
    assert_arrived(optimizer, saved.optimizer)
    assert (status(optimizer).iterations, status(optimizer).skipped) == (2, 0)


PLACES_OF_A_COUNTER = {
    "alone": lambda optimizer: {"step": optimizer.iterations},
    "before": lambda optimizer: {"a": optimizer.iterations, "optimizer": optimizer},
    "after": lambda optimizer: {"optimizer": optimizer, "step": optimizer.iterations},
    "below": lambda optimizer: {"optimizer": optimizer, "steps": [[[optimizer.iterations]]]},
}


@on_keras_3_of_tensorflow
@BUILT
@pytest.mark.parametrize("place", PLACES_OF_A_COUNTER)
def test_a_checkpoint_has_the_step_counter_by_itself(tmp_path, is_built, place):
    variables, children = [variable([1.0, -1.0])], PLACES_OF_A_COUNTER[place]
    optimizer, other = ours(adam()), ours(adam())
    for factor in (0.5, 1.0, 0.25, INF):
        step(optimizer, variables, factor)
    path = tf.train.Checkpoint(**children(optimizer)).write(tmp_path / "a")
    for _ in range(2 if is_built else 0):
        step(other, variables, INF)
    tf.train.Checkpoint(**children(other)).read(path)
    other.build(variables)
    assert int(other.iterations) == 4
    assert repr(other.iterations) == repr(optimizer.iterations)
    if place != "alone":
        assert_arrived(other, optimizer)


# --- Copies and configurations --------------------------------------------------------------------

FAMILIES = [keras.optimizers, *([] if IS_KERAS_3 else [keras.optimizers.legacy])]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dynamic": False, "initial_scale": 4, "name": "named"},
        {"initial_scale": 8, "dynamic_growth_steps": 3},
        {"rule": DynamicScale(max_scale=64, initial_scale=2)},
        {"rule": FixedScale(4, skip_nonfinite=True)},
    ],
    ids=str,
)
def test_a_configuration_makes_the_same_optimizer(optimizers, arguments):
    optimizer = ours(optimizers.Adam(0.5, beta_1=0.75), **arguments)
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
    "current": lambda family: ours(family.Adam(0.1)),
    # In tf_keras one variable of it is in no list.
    "Nadam": lambda family: ours(family.Nadam(0.1)),
    "of TensorFlow 2.0": lambda family: lossscale.experimental.LossScaleOptimizer(
        family.Adam(0.1), lossscale.experimental.DynamicLossScale(2**10, 3)
    ),
}


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
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(lossscale.errors.UnsupportedError, match="cannot be copied") as error:
            way(old)
    _, *lines = str(error.value).splitlines()
    assert len(lines) == 3
    given = {"old": old, "variables": variables, "keras": keras, "path": str(tmp_path / "copy")}
    for line in lines:
        exec(line.strip(), {**given, "tf": tf}, given)
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


@on_keras_3
def test_set_weights_does_not_take_the_variables_of_keras_own_class():
    optimizer, theirs = (model_with(wrap(adam())).optimizer for wrap in (ours, own))
    filled(theirs)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"Expected 5 weights, or all 11 variables.*10 arrays"):
        optimizer.set_weights(values(theirs.variables))
    assert_unchanged(everything(optimizer), before)


# --- Runs that died -------------------------------------------------------------------------------


class Dies(keras.callbacks.Callback):
    """Ends a run at the start of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.last = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.last:
            raise InterruptedError


def test_a_run_that_died_goes_on_from_its_backup(tmp_path):
    def run(folder, dies_in_epoch=None):
        model = a_model(ours(adam()))
        model.set_weights([np.ones((4, 2)), np.zeros(2)])
        x = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
        x[9] = NAN
        callbacks = [keras.callbacks.BackupAndRestore(str(tmp_path / folder)), Dies(dies_in_epoch)]
        with contextlib.suppress(InterruptedError):
            model.fit(x, x[:, :2], 4, 4, shuffle=False, verbose=0, callbacks=callbacks)
        return status(model.optimizer), [each.tolist() for each in model.get_weights()]

    whole = run("whole")
    assert whole[0].skipped == 4
    assert run("killed", 2)[0].iterations == 8
    assert run("killed") == whole

"""A checkpoint of every release goes on in our optimizer as it would have gone on there."""

import atexit
import functools
import itertools
import pathlib
import shutil
import tempfile
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
import support
from lossscale.errors import OldFileError
from lossscale.rules import ScaleRule
from lossscale_migration import migrate_file, restore_checkpoint
from support import FAMILIES, FIXTURES, ONLY_NEW, OPTIMIZERS, SAVED_SETTINGS, WITNESS

DYNAMIC = sorted(FIXTURES.glob("ck/*.index"))
FIXED = sorted(FIXTURES.glob("ckf/*.index"))
TARGETS = {"keras": keras.optimizers, **FAMILIES}


def path_id(path):
    return path.name.removesuffix("-1.index")


def sgd_elsewhere(target="keras", **arguments):
    """Ours, with every number different from those in the files."""
    inner = TARGETS[target].SGD(0.5, momentum=0.25)
    arguments = arguments or {"initial_scale": 4.0, "dynamic_growth_steps": 2}
    return lossscale.LossScaleOptimizer(inner, **arguments)


def momentum_of(optimizer, variable):
    return optimizer.get_slot(variable, "momentum").numpy()


def test_there_are_files_of_every_kind():
    kinds = {path_id(path).rpartition("_")[2] for path in DYNAMIC}
    assert kinds == {"exp", "new", "legacy", "v3"}
    assert len(DYNAMIC) == len(FIXED) == 7


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("path", DYNAMIC, ids=path_id)
def test_a_real_file_restores_everything_and_goes_on_as_computed_by_hand(path, target, built):
    v, optimizer = tf.Variable([5.0], name="v"), sgd_elsewhere(target)
    for _ in range(4 if built else 0):
        optimizer.minimize(lambda: v * 0.0, [v])
    restored = restore_checkpoint(path, optimizer=optimizer, v=v)
    assert (restored.variables, restored.slots, restored.left) == (1, 1, ())
    np.testing.assert_allclose(v.numpy(), [0.8])
    np.testing.assert_allclose(momentum_of(optimizer, v), [-0.2])
    assert support.number(optimizer.iterations) == 1
    assert support.number(optimizer.inner_optimizer.iterations) == 1
    assert support.number(optimizer.steps_skipped) == 0
    assert support.number(optimizer.loss_scale) == 8.0
    assert support.number(optimizer.dynamic_counter) == 1
    assert support.number(optimizer.learning_rate) == pytest.approx(0.1)
    # The new optimizers of TensorFlow put no other hyperparameter into a checkpoint.
    momentum = 0.25 if "v3" in path.name else 0.9
    assert support.number(optimizer.inner_optimizer.momentum) == pytest.approx(momentum)

    optimizer.minimize(lambda: v * 2.0, [v])
    np.testing.assert_allclose(v.numpy(), [0.8 + momentum * -0.2 - 0.1 * 2.0], rtol=1e-6)
    # The second finite step in a row doubles the scale.
    assert support.number(optimizer.loss_scale) == 16.0
    assert support.number(optimizer.iterations) == 2


@pytest.mark.parametrize(
    ("path", "target", "dynamic"),
    [
        *itertools.product(FIXED, TARGETS, [False, True]),
        *itertools.product(DYNAMIC, TARGETS, [False]),
    ],
    ids=lambda value: path_id(value) if isinstance(value, pathlib.Path) else None,
)
def test_a_scale_stays_if_it_is_fixed_in_the_file_or_here(path, target, dynamic):
    v = tf.Variable([5.0], name="v")
    optimizer = sgd_elsewhere(target, dynamic=dynamic, initial_scale=32.0)
    restored = restore_checkpoint(path, optimizer=optimizer, v=v)
    assert restored.left == (("loss_scale",) if path in DYNAMIC else ())
    np.testing.assert_allclose(v.numpy(), [0.8])
    np.testing.assert_allclose(momentum_of(optimizer, v), [-0.2])
    assert support.number(optimizer.iterations) == 1
    assert support.number(optimizer.loss_scale) == 32.0


def test_a_slot_is_made_that_the_settings_of_ours_do_not_ask_for():
    v = tf.Variable([5.0], name="v")
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5))
    restore_checkpoint(DYNAMIC[0], optimizer=optimizer, v=v)
    np.testing.assert_allclose(momentum_of(optimizer, v), [-0.2])


def restored_with(loss_scale, path):
    """The older optimizer, which holds a loss scale; and what was restored."""
    inner = keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer = lossscale.experimental.LossScaleOptimizer(inner, loss_scale)
    return optimizer, restore_checkpoint(path, optimizer=optimizer, v=tf.Variable([5.0]))


@pytest.mark.parametrize("path", DYNAMIC[:1] + DYNAMIC[-1:], ids=path_id)
def test_the_older_optimizer_takes_it_too(path):
    optimizer, _ = restored_with("dynamic", path)
    assert support.number(optimizer.loss_scale()) == 8.0


class Halving(lossscale.experimental.LossScale):
    """A loss scale of a user's own."""

    def __init__(self):
        self.current = self._add_weight("current_loss_scale", 64.0)
        self.steps = self._add_weight("good_steps", 0, "int64")

    def __call__(self):
        return self.current + 0.0

    def update(self, grads):
        return None, True

    def get_config(self):
        return {}


def test_a_loss_scale_of_ones_own_gets_its_variables_by_name():
    scale = Halving()
    _, restored = restored_with(scale, DYNAMIC[0])
    assert (support.number(scale()), support.number(scale.steps)) == (8.0, 1)
    assert restored.left == ()


class OnlyAScale(NamedTuple):
    scale: float = 2.0**15


class WithMore(NamedTuple):
    scale: float = 2.0**15
    good_steps: int = 0
    lowest: float = 1.0


class HalvingRule(ScaleRule):
    """Halves after an overflow, and never grows."""

    powers_of_two = True

    def __init__(self, state):
        self.state = state

    def init(self):
        return self.state()

    def update(self, state, finite, *, xp):
        return state._replace(scale=xp.where(finite, state.scale, state.scale * 0.5))

    def get_config(self):
        return {}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("state", [OnlyAScale, WithMore])
def test_what_the_rule_has_is_restored(state, library):
    (of_2_4,) = FIXTURES.glob("ck/2.4.4_new-1.index")
    v = tf.Variable([5.0])
    inner = library.optimizers.SGD(0.5, momentum=0.9)
    optimizer = lossscale.LossScaleOptimizer(inner, rule=HalvingRule(state))
    restore_checkpoint(of_2_4, optimizer=optimizer, v=v)
    assert support.number(optimizer.loss_scale) == 8.0
    assert support.number(optimizer.iterations) == 1
    optimizer.minimize(lambda: v * np.inf, [v])
    assert support.number(optimizer.loss_scale) == 4.0
    np.testing.assert_allclose(v.numpy(), [0.8])


def made(module, case, rate, **others):
    """An optimizer to wrap, with some arguments of the case given otherwise."""
    name, arguments = {**OPTIMIZERS, **ONLY_NEW}[case]
    return getattr(module, name)(learning_rate=rate, **{**arguments, **others})


def saved(optimizer, folder, steps=4):
    """Two variables that an optimizer trained, and the checkpoint of all."""
    w, u = trained = support.tf_variables()
    support.train(optimizer, trained, steps)
    return trained, tf.train.Checkpoint(optimizer=optimizer, w=w, u=u).save(str(folder / "ck"))


def restored(path, optimizer):
    """Two variables with what a checkpoint holds, as the optimizer now has."""
    mine = [tf.Variable(tf.zeros((2, 2)), name=name) for name in "wu"]
    restore_checkpoint(path, optimizer=optimizer, w=mine[0], u=mine[1])
    return mine


def assert_goes_on(optimizer, mine, witness, theirs, steps=4):
    for each, variables in ((witness, theirs), (optimizer, mine)):
        support.train(each, variables, steps, start=steps)
    np.testing.assert_allclose(support.values(mine), support.values(theirs), rtol=1e-5)


@functools.cache
def witnessed(family, case):
    """A checkpoint after four steps; the variables and the scale then, and after four more."""
    folder = tempfile.TemporaryDirectory()
    # As long as the tests run.
    atexit.register(folder.cleanup)
    inner = made(FAMILIES[family], case, 0.05)
    witness = WITNESS(inner, initial_scale=16.0, dynamic_growth_steps=3)
    variables, path = saved(witness, pathlib.Path(folder.name))
    then = support.values(variables), support.number(witness.loss_scale)
    support.train(witness, variables, 4, start=4)
    assert support.number(witness.iterations) == 8
    return path, then, (support.values(variables), support.number(witness.loss_scale))


def optimizer_to_fill(family, case, target="keras"):
    """Ours; what a file of this family holds is set to other numbers."""
    _, arguments = {**OPTIMIZERS, **ONLY_NEW}[case]
    others = {name: 0.3 for name in SAVED_SETTINGS & set(arguments) if family == "legacy"}
    inner = made(TARGETS[target], case, 0.9, **others)
    return lossscale.LossScaleOptimizer(inner, initial_scale=2.0, dynamic_growth_steps=3)


@pytest.mark.parametrize(
    ("family", "case", "target"),
    [
        (family, case, target)
        for target in TARGETS
        for family in FAMILIES
        for case in (*OPTIMIZERS, *(ONLY_NEW if family == "new" else ()))
        if target != "legacy" or case not in ONLY_NEW
    ],
)
def test_training_goes_on_as_in_tf_keras(family, case, target):
    path, (then, scale), (later, later_scale) = witnessed(family, case)
    optimizer = optimizer_to_fill(family, case, target)
    mine = restored(path, optimizer)
    np.testing.assert_array_equal(support.values(mine), then)
    assert support.number(optimizer.loss_scale) == scale == 32.0
    assert support.number(optimizer.dynamic_counter) == 1
    support.train(optimizer, mine, 4, start=4)
    assert not np.allclose(then, support.values(mine), atol=1e-5)
    np.testing.assert_allclose(support.values(mine), later, rtol=2e-4, atol=2e-6)
    assert support.number(optimizer.loss_scale) == later_scale
    assert support.number(optimizer.iterations) == 8


def test_the_average_of_weights_is_restored(tmp_path):
    witness = WITNESS(made(tf_keras.optimizers, "ema", 0.05))
    _, path = saved(witness, tmp_path)
    optimizer = optimizer_to_fill("new", "ema")
    averages = witness.inner_optimizer._model_variables_moving_average
    for variable, average in zip(restored(path, optimizer), averages, strict=True):
        found = optimizer.get_slot(variable, "average")
        np.testing.assert_array_equal(found.numpy(), average.numpy())


def test_the_state_of_a_legacy_nadam_is_kept_with_a_warning_of_the_difference(tmp_path):
    inner = tf_keras.optimizers.legacy.Nadam(0.05)
    theirs, path = saved(WITNESS(inner), tmp_path)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Nadam(0.5))
    with pytest.warns(lossscale.LossScaleWarning, match=r"schedule_decay=0\.004"):
        mine = restored(path, optimizer)
    for variable, original in zip(mine, theirs, strict=True):
        for slot in ("m", "v"):
            found = optimizer.get_slot(variable, slot).numpy()
            np.testing.assert_array_equal(found, inner.get_slot(original, slot).numpy())
    product = support.number(optimizer.inner_optimizer._u_product)
    assert product == support.number(inner._m_cache) != 1.0
    assert support.number(optimizer.learning_rate) == pytest.approx(0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nadam_goes_on_in_a_legacy_one(family, tmp_path):
    witness = WITNESS(FAMILIES[family].Nadam(0.05))
    theirs, path = saved(witness, tmp_path)
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.Nadam(0.5))
    assert_goes_on(optimizer, restored(path, optimizer), witness, theirs)


@pytest.mark.parametrize("target", TARGETS)
def test_decay_goes_on(target, tmp_path):
    witness = WITNESS(tf_keras.optimizers.legacy.SGD(0.5, momentum=0.5, decay=0.25))
    theirs, mine = support.tf_variables(), support.tf_variables()
    support.train(witness, theirs, 3)
    # A list of variables is one of the objects.
    path = tf.train.Checkpoint(optimizer=witness, v=theirs).save(str(tmp_path / "ck"))
    optimizer = lossscale.LossScaleOptimizer(TARGETS[target].SGD(0.9, momentum=0.5))
    restore_checkpoint(path, optimizer=optimizer, v=mine)
    assert_goes_on(optimizer, mine, witness, theirs, steps=3)
    if target == "keras":
        assert support.number(optimizer.learning_rate) == pytest.approx(0.5 / (1 + 0.25 * 6))


def test_a_schedule_of_ours_stays(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 1, 0.5)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(schedule, momentum=0.9))
    restore_checkpoint(DYNAMIC[0], optimizer=optimizer, v=tf.Variable([1.0]))
    assert support.number(optimizer.learning_rate) == 0.125


@pytest.mark.parametrize(
    ("wrap", "family", "target", "applied"),
    [
        # TensorFlow counts a skipped step among the iterations, and nowhere else.
        (WITNESS, "legacy", "keras", 3),
        (lossscale.LossScaleOptimizer, "legacy", "legacy", 2),
        (lossscale.LossScaleOptimizer, "new", "new", 2),
    ],
    ids=["theirs", "ours-legacy", "ours-new"],
)
def test_skipped_steps_are_counted_as_in_the_file(wrap, family, target, applied, tmp_path):
    theirs = wrap(FAMILIES[family].SGD(0.1, momentum=0.9), initial_scale=16.0)
    w, u = support.tf_variables()
    support.train(theirs, [w, u], 2)
    theirs.minimize(lambda: tf.reduce_sum(w * u) * np.inf, [w, u])
    path = tf.train.Checkpoint(optimizer=theirs, w=w, u=u).save(str(tmp_path / "ck"))
    optimizer = sgd_elsewhere(target)
    restored(path, optimizer)
    assert support.number(optimizer.iterations) == 3
    assert support.number(optimizer.inner_optimizer.iterations) == applied
    assert support.number(optimizer.steps_skipped) == 3 - applied
    assert support.number(optimizer.loss_scale) == 8.0


KINDS = {
    "plain legacy": (FAMILIES["legacy"], None, 2.0, 0),
    "plain new": (FAMILIES["new"], None, 2.0, 0),
    "plain Keras 3": (keras.optimizers, None, 2.0, 0),
    "Keras 3": (keras.optimizers, keras.optimizers.LossScaleOptimizer, 8.0, 3),
    "ours": (keras.optimizers, lossscale.LossScaleOptimizer, 4.0, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_a_plain_optimizer_or_of_keras_3(kind, tmp_path):
    module, wrap, scale, counter = KINDS[kind]
    theirs = module.Adam(0.05, beta_1=0.5, beta_2=0.5)
    theirs = wrap(theirs, initial_scale=8.0) if wrap else theirs
    w, u = variables = support.tf_variables()
    for step in support.gradients(3):
        if kind == "ours":
            theirs.minimize(support.loss_of(variables, step), variables)
        else:
            factor = 8.0 if wrap else 1.0
            pairs = zip(step, variables, strict=True)
            theirs.apply_gradients([(tf.constant(g) * factor, v) for g, v in pairs])
    if kind == "ours":
        theirs.minimize(lambda: tf.reduce_sum(w) * np.nan, [w, u])
    path = tf.train.Checkpoint(optimizer=theirs, w=w, u=u).save(str(tmp_path / "ck"))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=2.0)
    mine = restored(path, optimizer)
    support.assert_equal(support.values(mine), support.values(variables))
    assert support.number(optimizer.loss_scale) == scale
    assert support.number(optimizer.dynamic_counter) == counter
    assert support.number(optimizer.steps_skipped) == (kind == "ours")
    assert support.number(optimizer.inner_optimizer.iterations) == 3
    first, second, third = support.gradients(3)
    for slot, power in (("m", 1), ("v", 2)):
        found = support.values([optimizer.get_slot(v, slot) for v in mine])
        expected = first**power / 8 + second**power / 4 + third**power / 2
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_variables_of_one_name_need_the_order_of_then(tmp_path):
    # The slots of a new optimizer are known by the names of variables; here these are the same.
    witness = WITNESS(tf_keras.optimizers.Adam(0.05))
    first, second = (tf.Variable(v) for v in support.tf_variables())
    support.train(witness, [first, second], 3)
    path = tf.train.Checkpoint(optimizer=witness, a=second, b=first).save(str(tmp_path / "ck"))
    b, a = (tf.Variable(tf.zeros_like(v)) for v in (first, second))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    with pytest.raises(OldFileError, match=r"share a name.*optimizer\.build\(variables\)"):
        restore_checkpoint(path, optimizer=optimizer, a=a, b=b)
    assert not a.numpy().any()
    assert not optimizer.built
    optimizer.build([b, a])
    restore_checkpoint(path, optimizer=optimizer, a=a, b=b)
    momentums = witness.inner_optimizer._momentums
    for variable, momentum in zip((b, a), momentums, strict=True):
        found = optimizer.get_slot(variable, "m").numpy()
        np.testing.assert_array_equal(found, momentum.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_the_objects_does_not_matter(family, tmp_path):
    inner = made(FAMILIES[family], "adam", 0.05)
    theirs, path = saved(WITNESS(inner), tmp_path)
    mine = {name: tf.Variable(tf.zeros((2, 2))) for name in "uw"}
    optimizer = optimizer_to_fill(family, "adam")
    restore_checkpoint(path, optimizer=optimizer, **mine)
    momentums = [inner.get_slot(v, "m") for v in theirs] if family == "legacy" else inner._momentums
    for name, momentum in zip("wu", momentums, strict=True):
        found = optimizer.get_slot(mine[name], "m").numpy()
        np.testing.assert_array_equal(found, momentum.numpy())


def test_layers_are_known_by_their_names_where_these_are_the_same(tmp_path):
    def branches(module, names):
        inputs = module.layers.Input((2,))
        made = {name: module.layers.Dense(2, name=name)(inputs) for name in names}
        return module.Model(inputs, [made["first"], made["second"]])

    theirs = branches(tf_keras, ["first", "second"])
    theirs.save_weights(str(tmp_path / "ck"))
    # Made in the other order, the layers of this model stand in the other order.
    mine = branches(keras, ["second", "first"])
    restore_checkpoint(tmp_path / "ck", root=mine)
    for name in ("first", "second"):
        expected = theirs.get_layer(name).kernel.numpy()
        np.testing.assert_array_equal(mine.get_layer(name).kernel.numpy(), expected)


@pytest.mark.parametrize("form", ["prefix", "index", "data", "folder", "converted", "SavedModel"])
def test_the_ways_to_name_a_checkpoint(form, tmp_path):
    source = tf.train.Checkpoint(v=tf.Variable([2.5]), optimizer=WITNESS(tf_keras.optimizers.SGD()))
    path = source.save(str(tmp_path / "ck"))
    named = {
        "prefix": path,
        "index": pathlib.Path(f"{path}.index"),
        "data": f"{path}.data-00000-of-00001",
        "folder": tmp_path,
        "converted": tmp_path / "new.h5",
        "SavedModel": tmp_path / "saved",
    }[form]
    if form == "converted":
        migrate_file(path, named)
        for old in tmp_path.glob("ck*"):
            old.unlink()
    if form == "SavedModel":
        module = tf.Module()
        module.v = source.v
        tf.saved_model.save(module, str(named))
    v = tf.Variable([0.0])
    restore_checkpoint(named, v=v)
    assert v.numpy() == [2.5]


@pytest.mark.parametrize("path", DYNAMIC, ids=path_id)
def test_a_converted_checkpoint_restores_the_same(path, tmp_path):
    new = migrate_file(path, tmp_path / "new.h5")
    v, optimizer = tf.Variable([5.0]), sgd_elsewhere()
    restore_checkpoint(new, optimizer=optimizer, v=v)
    expected, reference = tf.Variable([5.0]), sgd_elsewhere()
    restore_checkpoint(path, optimizer=reference, v=expected)
    assert v.numpy() == expected.numpy() == np.float32(0.8)
    assert support.values(optimizer.variables) == support.values(reference.variables)


DAMAGES = {
    "no data": lambda index, data: data.unlink(),
    "cut data": lambda index, data: data.write_bytes(data.read_bytes()[:4]),
    "empty data": lambda index, data: data.write_bytes(b""),
    "changed data": lambda index, data: data.write_bytes(b"\xff" + data.read_bytes()[1:]),
    "cut index": lambda index, data: index.write_bytes(index.read_bytes()[:-20]),
    "empty index": lambda index, data: index.write_bytes(b""),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(how, tmp_path):
    index, data = (tmp_path / f"copy{end}" for end in (".index", ".data-00000-of-00001"))
    for path in (index, data):
        shutil.copy(FIXTURES / "ck" / path.name.replace("copy", "2.4.4_new-1"), path)
    restore_checkpoint(index, v=tf.Variable([5.0]))
    DAMAGES[how](index, data)
    v, optimizer = tf.Variable([5.0]), sgd_elsewhere()
    before = support.values(optimizer.variables)
    with pytest.raises(OldFileError, match=r"copy: damaged or incomplete: \S"):
        restore_checkpoint(index, optimizer=optimizer, v=v)
    assert v.numpy() == [5.0]
    assert support.values(optimizer.variables) == before
    assert optimizer.momentum == 0.25


def with_v(cls, wrap=lambda inner: inner):
    return lambda v, _: {"optimizer": wrap(cls()), "v": v}


MISFITS = {
    "nothing to restore into": lambda v, opt: {},
    r"no object named 'w'; it contains \['optimizer', ": lambda v, opt: {"w": v},
    r"shape \(1,\) in the file": lambda v, opt: {"v": tf.Variable([1.0, 2.0])},
    "contains no value for the variable": lambda v, opt: {"v": [v]},
    "belongs to the variable 'v'": lambda v, opt: {"optimizer": opt},
    "must have loss scaling": with_v(keras.optimizers.SGD),
    "Adam has no hyperparameter 'momentum'": with_v(keras.optimizers.Adam, support.ours),
    "Adagrad has no hyperparameter 'momentum'": with_v(keras.optimizers.Adagrad, support.ours),
}
ERRORS = {"nothing to restore into": ValueError, "must have loss scaling": TypeError}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_named_and_changes_nothing(message):
    v, optimizer = tf.Variable([5.0]), sgd_elsewhere()
    with pytest.raises(ERRORS.get(message, OldFileError), match=message):
        restore_checkpoint(DYNAMIC[0], **MISFITS[message](v, optimizer))
    assert v.numpy() == [5.0]
    assert optimizer.momentum == 0.25


@pytest.mark.parametrize("shares", ["file", "program"])
def test_a_variable_of_two_names_is_one_on_both_sides(shares, tmp_path):
    v, w = tf.Variable([1.0]), tf.Variable([2.0])
    path = tf.train.Checkpoint(a=v, b=v if shares == "file" else w).save(tmp_path / "ckpt")
    x, y = tf.Variable([5.0]), tf.Variable([6.0])
    with pytest.raises(OldFileError, match=f"a and b are one variable in (the|this) {shares} and"):
        restore_checkpoint(path, a=x, b=y if shares == "file" else x)
    assert (x.numpy(), y.numpy()) == ([5.0], [6.0])


def test_state_without_a_place_takes_the_settings_back(tmp_path):
    inner = tf_keras.optimizers.legacy.RMSprop(0.1, rho=0.5, centered=True)
    _, path = saved(WITNESS(inner), tmp_path, steps=1)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.RMSprop(0.2, rho=0.25))
    with pytest.raises(OldFileError, match=r"'RMSprop/[wu]/mg'; RMSprop has"):
        restored(path, optimizer)
    assert optimizer.rho == 0.25
    assert support.number(optimizer.learning_rate) == pytest.approx(0.2)


def test_a_checkpoint_by_names_is_none_of_these(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("v", [1])
        session.run(v.initializer)
        saver = tf.compat.v1.train.Saver([v])
        path = saver.save(session, str(tmp_path / "old"), write_meta_graph=False)
    with pytest.raises(OldFileError, match="holds variables by name, not objects"):
        restore_checkpoint(path, v=tf.Variable([1.0]))


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "no such file or checkpoint"), ("folder", "no checkpoint in this folder")],
)
def test_where_there_is_none(name, message, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OldFileError, match=message):
        restore_checkpoint(tmp_path / name, v=tf.Variable([1.0]))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_of_a_compiled_model_goes_into_a_model(compiled, tmp_path):
    def compile_with_ours(model):
        model.compile(support.ours(keras.optimizers.Adam(0.1)), "mse", run_eagerly=True)

    theirs, mine = support.dense(keras), keras.models.clone_model(support.dense(keras))
    compile_with_ours(theirs)
    support.fit(theirs, 1)
    path = tf.train.Checkpoint(model=theirs).save(str(tmp_path / "ck"))
    if compiled:
        compile_with_ours(mine)
    restore_checkpoint(path, model=mine)
    support.assert_equal(support.values(mine.variables), support.values(theirs.variables))
    assert not compiled or support.number(mine.optimizer.iterations) == 1

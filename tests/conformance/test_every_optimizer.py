"""What every optimizer of the framework keeps inside of ours: its updates, its state, its files."""

import importlib

import numpy as np
import pytest

import lossscale
from conformance.every_optimizer import makers, of_optax, state_of
from conformance.harness import IS_TF_KERAS, array
from conformance.recordings import same_bits, same_but_for_rounding
from conformance.wrappers import BACKEND, KERAS, WRAPPERS

FRAMEWORK = importlib.import_module(KERAS)
MAKERS = makers()
FORMATS = [
    ".keras",
    ".weights.h5",
    # Keras 3 itself loads no optimizer from it; lossscale-migration does, as its tests show.
    *([".h5"] if IS_TF_KERAS else []),
    *(["checkpoint"] if BACKEND == "tensorflow" else []),
]
SCALE = 8.0
RULE = lossscale.DynamicScale(SCALE, growth_interval=100)
VALUES = [np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)]
STEPS = [
    [np.full((2, 3), 0.5, np.float32), np.array([4.0, -0.125, 1.0], np.float32)],
    [np.array([[0.25, -1.0, 2.0], [0.5, 1.0, -4.0]], np.float32), np.ones(3, np.float32)],
    [np.full((2, 3), -0.75, np.float32), np.array([0.5, 0.5, -2.0], np.float32)],
]
BAD = [STEPS[0][0], np.array([1.0, np.inf, 1.0], np.float32)]

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def wrapped(inner):
    return lossscale.LossScaleOptimizer(inner, rule=RULE)


def state(optimizer):
    found = state_of(getattr(optimizer, "inner_optimizer", optimizer))
    return {place: array(variable) for place, variable in found.items()}


def same(left, right, compare=same_bits):
    assert list(left) == list(right)
    compare(list(left.values()), list(right.values()))


def state_inside(harness):
    if OF_OPTAX and not hasattr(harness.optimizer, "apply_gradients"):
        return dict(enumerate(harness.inner_state()))
    return state(harness.optimizer)


# A skipped step of a `tf.function` runs nothing of the optimizer, whichever it is. XLA runs all of
# it and puts back what it keeps, so that each has to be asked there.
IN_A_FUNCTION = ("SGD", "Nadam", "MultiOptimizer", "a user's")


OF_KERAS = [
    row for row in WRAPPERS if "keras" in row.family and (not row.like or row.name.endswith("xla"))
]
if BACKEND == "jax":
    OF_KERAS = [row for row in OF_KERAS if row.compiles]
CASES = [
    pytest.param(make, row, id=f"{name}-{row.name}")
    for name, make in MAKERS.items()
    for row in OF_KERAS
    if not IS_TF_KERAS or row.family == f"tf_keras-{name.partition('-')[0]}"
    if not row.name.endswith("function") or name.rpartition("-")[2] in IN_A_FUNCTION
]
OF_OPTAX = [row for row in WRAPPERS if row.name in ("optax-native-jit", "optax-native-eager")]
CASES += [
    pytest.param(make, row, id=f"{name}-{row.name}")
    for name, make in (of_optax() if OF_OPTAX else ())
    for row in OF_OPTAX
]


def has_kernels(make, row):
    if row.family != "tf_keras-legacy":
        return True
    import tensorflow as tf

    try:
        row.harness(VALUES, make).step(STEPS[0])
    except tf.errors.InvalidArgumentError as error:
        # Adam with amsgrad.
        if "unsupported operations" not in str(error):
            raise
        return False
    return True


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")
@pytest.mark.parametrize(("make", "row"), CASES)
def test_it_trains_as_bare_and_a_skipped_step_changes_none_of_its_state(make, row):
    if row.name.endswith("xla") and not has_kernels(make, row):
        pytest.skip("XLA has no operation for it, bare or wrapped")
    bare = row.harness(VALUES, make)
    ours = row.harness(VALUES, make, RULE)
    for number, gradients in enumerate(STEPS):
        if number == 1:
            before = ours.parameters(), state_inside(ours)
            ours.step(BAD)
            same_bits(ours.parameters(), before[0])
            same(state_inside(ours), before[1])
        bare.step(gradients)
        ours.step(gradients)
    # A compiler may round an update otherwise as soon as something multiplies the gradient.
    compare = same_but_for_rounding if row.compiles else same_bits
    compare(ours.parameters(), bare.parameters())
    same(state_inside(ours), state_inside(bare), compare)
    assert ours.counters()[1] == 1


# --- Files ----------------------------------------------------------------------------------------


def model_with(optimizer):
    layers = FRAMEWORK.layers
    model = FRAMEWORK.Sequential([layers.Input((2,)), layers.Dense(3)])
    model.set_weights(VALUES)
    model.compile(optimizer, loss="mse")
    return built(model)


def built(model):
    optimizer = model.optimizer
    # What the legacy optimizers of tf_keras call it.
    make = getattr(optimizer, "build", None) or optimizer._create_all_weights
    make(model.trainable_variables)
    return model


def step(model, gradients):
    optimizer = model.optimizer
    if IS_TF_KERAS:
        scaled = [gradient * optimizer.get_scaled_loss(1.0) for gradient in gradients]
        found = optimizer.get_unscaled_gradients(scaled)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    else:
        factor = optimizer.scale_loss(np.float32(1))
        given = [FRAMEWORK.ops.convert_to_tensor(gradient) * factor for gradient in gradients]
        optimizer.apply(given, model.trainable_variables)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("name", MAKERS)
def test_a_file_brings_all_of_its_state_back(name, tmp_path):
    saved = model_with(wrapped(MAKERS[name]()))
    for gradients in (STEPS[0], BAD, STEPS[1]):
        step(saved, gradients)
    kept = state(saved.optimizer)
    forms = [form for form in FORMATS if is_a_form_of(form, name, tmp_path)]
    assert forms
    for form in forms:
        path = str(tmp_path / f"saved{'' if form == 'checkpoint' else form}")
        if form == "checkpoint":
            checkpoint_of(saved).write(path)
        elif form == ".weights.h5":
            saved.save_weights(path)
        else:
            saved.save(path)
        loaded = loaded_from(path, form, name)
        same(kept, state(loaded.optimizer))
        same_bits(saved.get_weights(), loaded.get_weights())
        if name.startswith("legacy-") and form == ".h5":
            # tf_keras writes the inner optimizer's weights there and nothing else.
            assert int(loaded.optimizer.steps_skipped) == 0
        else:
            assert float(loaded.optimizer.loss_scale) == SCALE / 2
            assert int(loaded.optimizer.steps_skipped) == 1
    # What holds the same trains on in the same way, whatever it came from: so the last of them.
    for model in (saved, loaded):
        step(model, STEPS[2])
    same_bits(saved.get_weights(), loaded.get_weights())
    same(state(saved.optimizer), state(loaded.optimizer))


def is_a_form_of(form, name, folder):
    """Whether the framework itself writes an optimizer into files of this form."""
    if name.startswith("legacy-") and form in (".keras", ".weights.h5"):
        # tf_keras writes no state of a legacy optimizer into them.
        return False
    return form != ".h5" or can_be_written(model_with(MAKERS[name]()), folder / "bare.h5")


def can_be_written(model, path):
    try:
        model.save(path)
    except ValueError as error:
        # Two of its variables have one name (Adafactor of Keras 3).
        if "name already exists" not in str(error):
            raise
        return False
    return True


def loaded_from(path, form, name):
    if form in (".keras", ".h5"):
        return built(FRAMEWORK.models.load_model(path))
    fresh = model_with(wrapped(MAKERS[name]()))
    if form == "checkpoint":
        checkpoint_of(fresh).read(path).assert_existing_objects_matched()
    else:
        fresh.load_weights(path)
    return fresh


def checkpoint_of(model):
    import tensorflow as tf

    variables = {f"v{i}": v for i, v in enumerate(model.trainable_variables)}
    if not IS_TF_KERAS:
        variables = {name: variable.value for name, variable in variables.items()}
    return tf.train.Checkpoint(optimizer=model.optimizer, **variables)

"""What every optimizer of the framework keeps inside of ours: its updates, its state, its files."""

import os

import numpy as np
import pytest

import lossscale
import lossscale.migration
from conformance.every_optimizer import IS_TF_KERAS, makers, state_of

BACKEND = os.environ["KERAS_BACKEND"]
MAKERS = makers()
MODES = {"jax": ["jit"], "torch": ["eager"], "tensorflow": ["eager", "function", "xla"]}[BACKEND]
FORMATS = [".keras", ".weights.h5", ".h5", *(["checkpoint"] if BACKEND == "tensorflow" else [])]
SCALE = 8.0
STEPS = [
    [np.full((2, 3), 0.5, np.float32), np.array([4.0, -0.125, 1.0], np.float32)],
    [np.array([[0.25, -1.0, 2.0], [0.5, 1.0, -4.0]], np.float32), np.ones(3, np.float32)],
    [np.full((2, 3), -0.75, np.float32), np.array([0.5, 0.5, -2.0], np.float32)],
]
BAD = [STEPS[0][0], np.array([1.0, np.inf, 1.0], np.float32)]


pytestmark = pytest.mark.usefixtures("compiled_quickly")


def framework():
    if IS_TF_KERAS:
        import tf_keras

        return tf_keras
    import keras

    return keras


def model_with(optimizer):
    layers = framework().layers
    model = framework().Sequential([layers.Input((2,)), layers.Dense(3)])
    model.set_weights([np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3), np.ones(3, "float32")])
    model.compile(optimizer, loss="mse")
    return model


def wrapped(inner):
    return lossscale.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=100)


def values(tracked):
    if IS_TF_KERAS:
        return [np.array(variable.numpy()) for variable in tracked]
    return [np.array(framework().ops.convert_to_numpy(variable)) for variable in tracked]


def state(optimizer):
    found = state_of(getattr(optimizer, "inner_optimizer", optimizer))
    return dict(zip(found, values(found.values()), strict=True))


def same(left, right, rtol=0.0):
    assert list(left) == list(right)
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, rtol=rtol, atol=rtol, err_msg=name)


def build(optimizer, variables):
    # What the legacy optimizers of tf_keras call it.
    make = getattr(optimizer, "build", None) or optimizer._create_all_weights
    make(variables)


class Training:
    """A model and its optimizer, stepped with given gradients in one mode."""

    def __init__(self, model, mode):
        self.model, self.optimizer = model, model.optimizer
        self.variables = model.trainable_variables
        build(self.optimizer, self.variables)
        self._scales = hasattr(self.optimizer, "steps_skipped")
        self._run = self._apply if mode == "eager" else getattr(self, f"_{mode}")()

    def step(self, gradients):
        self._run([framework_tensor(gradient) for gradient in gradients])

    def parameters(self):
        return dict(enumerate(values(self.variables)))

    def _apply(self, gradients):
        if not IS_TF_KERAS:
            self.optimizer.apply(self._of_scaled_loss(gradients), self.variables)
            return
        if self._scales:
            scale = self.optimizer.get_scaled_loss(1.0)
            gradients = self.optimizer.get_unscaled_gradients([g * scale for g in gradients])
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def _of_scaled_loss(self, gradients):
        factor = self.optimizer.scale_loss(np.float32(1)) if self._scales else 1
        return [gradient * factor for gradient in gradients]

    def _function(self):
        import tensorflow as tf

        return tf.function(self._apply)

    def _xla(self):
        import tensorflow as tf

        return tf.function(self._apply, jit_compile=True)

    def _jit(self):
        import jax
        import keras

        def pure(kept, gradients, trained):
            mapping = list(zip(self.optimizer.variables, kept, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                gradients = self._of_scaled_loss(gradients)
            return self.optimizer.stateless_apply(kept, gradients, trained)

        compiled = jax.jit(pure)

        def run(gradients):
            kept, trained = self.optimizer.variables, self.variables
            arrays = compiled([v.value for v in kept], gradients, [v.value for v in trained])
            for variable, value in zip([*trained, *kept], [*arrays[0], *arrays[1]], strict=True):
                variable.assign(value)

        return run


def framework_tensor(array):
    if IS_TF_KERAS:
        import tensorflow as tf

        return tf.constant(array)
    return framework().ops.convert_to_tensor(array)


def has_kernels(name):
    if not name.startswith("legacy-"):
        return True
    import tensorflow as tf

    try:
        Training(model_with(MAKERS[name]()), "xla").step(STEPS[0])
    except tf.errors.InvalidArgumentError as error:
        # Adam with amsgrad.
        if "unsupported operations" not in str(error):
            raise
        return False
    return True


# A skipped step of a `tf.function` runs nothing of the optimizer, whichever it is. XLA runs all of
# it and puts back what it keeps, so that each has to be asked there.
IN_A_FUNCTION = ("SGD", "Nadam", "MultiOptimizer", "a user's")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in MAKERS
        for mode in MODES
        if mode != "function" or name.rpartition("-")[2] in IN_A_FUNCTION
    ],
)
def test_it_trains_as_bare_and_a_skipped_step_changes_none_of_its_state(name, mode):
    # What a compiler makes of the bare one takes as long again, and only rounds otherwise. But
    # tf_keras' Nadam computes otherwise in a traced function.
    bare = Training(
        model_with(MAKERS[name]()), "function" if IS_TF_KERAS and mode != "eager" else "eager"
    )
    if mode == "xla" and not has_kernels(name):
        pytest.skip("XLA has no operation for it, bare or wrapped")
    ours = Training(model_with(wrapped(MAKERS[name]())), mode)
    for number, gradients in enumerate(STEPS):
        if number == 1:
            parameters, before = ours.parameters(), state(ours.optimizer)
            ours.step(BAD)
            same(ours.parameters(), parameters)
            same(state(ours.optimizer), before)
        bare.step(gradients)
        ours.step(gradients)
    rounding = 0.0 if mode == "eager" else 1e-5
    same(bare.parameters(), ours.parameters(), rounding)
    same(state(bare.optimizer), state(ours.optimizer), rounding)
    assert int(ours.optimizer.steps_skipped) == 1


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("name", MAKERS)
def test_a_file_brings_all_of_its_state_back(name, tmp_path):
    saved = Training(model_with(wrapped(MAKERS[name]())), "eager")
    for gradients in (STEPS[0], BAD, STEPS[1]):
        saved.step(gradients)
    kept = state(saved.optimizer)
    forms = [form for form in FORMATS if is_a_form_of(form, name, tmp_path)]
    assert forms
    for form in forms:
        path = str(tmp_path / f"saved{'' if form == 'checkpoint' else form}")
        if form == "checkpoint":
            checkpoint_of(saved).write(path)
        elif form == ".weights.h5":
            saved.model.save_weights(path)
        else:
            saved.model.save(path)
        loaded = loaded_from(path, form, name)
        same(kept, state(loaded.optimizer))
        same(saved.parameters(), loaded.parameters())
        if name.startswith("legacy-") and form == ".h5":
            # tf_keras writes the inner optimizer's weights there and nothing else.
            assert int(loaded.optimizer.steps_skipped) == 0
        else:
            assert float(loaded.optimizer.loss_scale) == SCALE / 2
            assert int(loaded.optimizer.steps_skipped) == 1
    # What holds the same trains on in the same way, whatever it came from: so the last of them.
    for training in (saved, loaded):
        training.step(STEPS[2])
    same(saved.parameters(), loaded.parameters())
    same(state(saved.optimizer), state(loaded.optimizer))


def is_a_form_of(form, name, folder):
    """Whether the framework itself writes an optimizer into files of this form."""
    if name.startswith("legacy-") and form in (".keras", ".weights.h5"):
        # tf_keras writes no state of a legacy optimizer into them.
        return False
    return form != ".h5" or can_be_written(model_with(MAKERS[name]()), folder / "bare.h5")


def can_be_written(model, path):
    build(model.optimizer, model.trainable_variables)
    try:
        model.save(path)
    except ValueError as error:
        # Two of its variables have one name (Adafactor of Keras 3).
        if "name already exists" not in str(error):
            raise
        return False
    return True


def loaded_from(path, form, name):
    if form == ".h5" and not IS_TF_KERAS:
        return Training(lossscale.migration.load_model(path), "eager")
    if form in (".keras", ".h5"):
        return Training(framework().models.load_model(path), "eager")
    fresh = Training(model_with(wrapped(MAKERS[name]())), "eager")
    if form == "checkpoint":
        checkpoint_of(fresh).read(path).assert_existing_objects_matched()
    else:
        fresh.model.load_weights(path)
    return fresh


def checkpoint_of(training):
    import tensorflow as tf

    model = {f"v{i}": v for i, v in enumerate(training.variables)}
    if not IS_TF_KERAS:
        model = {name: variable.value for name, variable in model.items()}
    return tf.train.Checkpoint(optimizer=training.optimizer, **model)

"""`guard(model)`: what a forward pass changes follows the applied steps, on each Keras.

The oracle is a run that was never given the spoiled batches.
"""

import copy
import functools
import importlib
import pickle
import warnings

import numpy as np
import pytest

import lossscale
from conformance.harness import array
from conformance.wrappers import BACKEND, KERAS
from forks import Program
from kerases import assert_same, status
from lossscale.errors import ArgumentTypeError, LossScaleWarning
from seeding import seed

if KERAS == "none":
    pytest.skip("about Keras", allow_module_level=True)

keras = importlib.import_module(KERAS)
guard = importlib.import_module(f"lossscale.{KERAS}").guard
layers, SGD = keras.layers, keras.optimizers.SGD
ON_TENSORFLOW = BACKEND not in ("jax", "torch")
ROWS, SPOILED = 4, (1, 4)
pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(autouse=True)
def float16():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


@keras.saving.register_keras_serializable("lossscale.tests")
class Counter(layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        settings = {"initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(shape=(), dtype="int32", name="calls", **settings)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x


class OwnStep(keras.Model):
    def train_step(self, *args):
        return super().train_step(*args)


@keras.saving.register_keras_serializable("lossscale.tests")
class Late(keras.Model):
    """A model whose layers make their weights when it is called."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.parts = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]

    def call(self, x, training=False):
        first, norm, last = self.parts
        return last(norm(first(x), training=training))

    def get_config(self):
        return {}


def small(cls=None, extra=()):
    """A model with everything that a forward pass may or may not change."""
    seed(0)
    inputs = keras.Input((3,))
    frozen = layers.Dense(4, kernel_initializer="ones")
    frozen.trainable = False
    x = layers.BatchNormalization(momentum=0.5)(layers.Dense(4)(inputs))
    x = Counter()(layers.BatchNormalization(momentum=0.5)(frozen(x)))
    for layer in extra:
        x = layer(x)
    return (cls or keras.Model)(inputs, layers.Dense(1, dtype="float32")(x))


def rows(batches=6, spoiled=SPOILED):
    """Inputs and targets; the float16 forward pass of the spoiled batches overflows."""
    x = np.random.default_rng(0).normal(size=(batches, ROWS, 3)).astype("float32")
    x[list(spoiled)] *= 1e6
    return x.reshape(-1, 3), np.ones((batches * ROWS, 1), "float32")


def without(x, y, spoiled=SPOILED):
    kept = [i for i in range(len(x)) if i // ROWS not in spoiled]
    return x[kept], y[kept]


def wrapped(rule=None):
    # A lower scale would round the float16 gradients of later steps differently.
    rule = rule or lossscale.FixedScale(2.0**4, skip_nonfinite=True)
    return lossscale.LossScaleOptimizer(SGD(0.125, momentum=0.5), rule=rule)


def compiled(model, optimizer=None, **arguments):
    """The model, which steps eagerly unless it is compiled for XLA or asked to be traced."""
    arguments.setdefault("run_eagerly", ON_TENSORFLOW and not arguments.get("jit_compile"))
    arguments.setdefault("jit_compile", BACKEND == "jax" and not arguments["run_eagerly"])
    model.compile(optimizer or wrapped(), "mse", **arguments)
    return model


def fit(model, data, **arguments):
    """Trains a model; returns its weights."""
    if getattr(model, "optimizer", None) is None:
        compiled(model, **arguments)
    model.fit(*data, batch_size=ROWS, shuffle=False, verbose=0)
    return weights(model)


def weights(model):
    return [array(each) for each in model.weights]


def skips(model):
    return int(array(model.optimizer.steps_skipped))


SEVERAL = {"steps_per_execution": 3, "run_eagerly": False}
WAYS = {
    "fit": {"run_eagerly": False},
    "eager": {"run_eagerly": True},
    "own train_step": {"cls": OwnStep},
    **({} if BACKEND == "torch" else {"several a call": SEVERAL}),
    **({"XLA": {"jit_compile": True}} if ON_TENSORFLOW else {}),
}


@functools.cache
def never_given(cls, is_guarded, **arguments):
    """The end of a run that was never given the spoiled batches."""
    model = small(cls)
    return fit(guard(model) if is_guarded else model, without(*rows()), **arguments)


@pytest.mark.parametrize("way", WAYS)
def test_a_guarded_run_ends_as_one_that_was_never_given_the_skipped_batches(way):
    arguments = dict(WAYS[way])
    cls = arguments.pop("cls", None)
    guarded = guard(small(cls))
    found = fit(guarded, rows(), **arguments)
    # Of one step or of several a call it ends with the same bits.
    arguments.pop("steps_per_execution", None)
    # XLA rounds the plain program in another way.
    is_guarded = way == "XLA" or (BACKEND == "jax" and way != "eager")
    assert_same(found, never_given(cls, is_guarded, **arguments))
    assert skips(guarded) == len(SPOILED)


def test_a_guard_changes_nothing_without_a_skip_and_much_with_one():
    settings = {"run_eagerly": False}
    guarded, plain = (never_given(None, each, **settings) for each in (True, False))
    # JAX rounds otherwise.
    close = {"rtol": 1e-5, "atol": 1e-6} if BACKEND == "jax" else {"rtol": 0}
    for one, other in zip(guarded, plain, strict=True):
        np.testing.assert_allclose(one, other, **close)
    assert any(np.isnan(each).any() for each in fit(small(), rows()))


def test_a_skip_of_the_first_step_of_all():
    """Where weights are made in the first step, they are what they were made as."""
    x, y = rows(2, spoiled=[0])
    model = guard(Late())
    found = fit(model, (x, y), run_eagerly=False)
    first, norm, _ = model.parts
    assert skips(model) == 1
    assert np.isfinite(found[4]).all()
    seen = array(first(x[ROWS:])).astype("float32")
    # Momentum 0.99, and one batch.
    assert array(norm.moving_mean).shape == (4,)
    assert np.abs(array(norm.moving_mean)).max() < np.abs(seen).max() * 0.02


@pytest.mark.skipif(not ON_TENSORFLOW, reason="of TensorFlow")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_replicas(two_replicas, run_eagerly):
    # Half of a batch for each; only one of them overflows.
    x, y = rows()
    x[4] = x[16] = 1e6
    results = []
    for data in ((x, y), without(x, y)):
        with two_replicas.scope():
            model = compiled(guard(small()), jit_compile=False, run_eagerly=run_eagerly)
        results.append(fit(model, data))
    assert_same(*results)
    parts = [two_replicas.experimental_local_results(_native(w)) for w in model.weights]
    # TensorFlow itself keeps what each replica has seen.
    for one, *others in parts:
        for other in others:
            assert np.isfinite(other.numpy()).all()
            assert one.shape == other.shape


def _native(variable):
    return getattr(variable, "_value", variable)


TWO_DEVICES = """
import json, keras, numpy as np
from conformance import test_guard as here
keras.mixed_precision.set_global_policy("mixed_float16")
devices = keras.distribution.list_devices()
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
data = here.rows()
found, expected = (
    here.fit(here.guard(here.small()), given) for given in (data, here.without(*data))
)
here.assert_same(found, expected)
print(len(devices))
"""


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_data_parallel_on_jax():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "KERAS_BACKEND": "jax"}
    done = Program(TWO_DEVICES, environment=flags).finished()
    assert done.stdout.split()[-1:] == ["2"], done.stderr


# --- Several optimizers ---------------------------------------------------------------------------


@pytest.mark.skipif(BACKEND == "jax", reason="whose `fit` keeps no state")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_states_of_recurrent_layers(run_eagerly):
    """A state that is NaN would skip every later step."""
    x, y = rows()
    x[np.abs(x) > 1e4] = np.nan
    ends = []
    for data in ((x, y), without(x, y)):
        seed(0)
        cells = layers.StackedRNNCells([layers.GRUCell(2), layers.LSTMCell(2)])
        inputs = keras.Input(batch_shape=(ROWS, 1, 3))
        hidden = layers.LSTM(2, stateful=True, return_sequences=True)(inputs)
        hidden = layers.RNN(cells, stateful=True)(hidden)
        model = guard(keras.Model(inputs, layers.Dense(1, dtype="float32")(hidden)))
        arguments = {"run_eagerly": run_eagerly, "jit_compile": False}
        ends.append(fit(model, (data[0][:, None], data[1]), **arguments))
    assert_same(*ends)


class Half(layers.Layer):
    """Has an average of what it has seen; few calls of Keras are quick to trace."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(3, 1), initializer="ones")
        self.average = self.add_weight(shape=(3,), initializer="zeros", trainable=False)
        self.built = True


def step_on_torch(half, x, y, optimizer):
    import torch

    half.average.value.copy_(0.5 * half.average.value + 0.5 * x.mean(0))
    half.kernel.value.grad = None
    optimizer.scale_loss(((x @ half.kernel.value - y) ** 2).mean()).backward()
    with torch.no_grad():
        optimizer.apply([half.kernel.value.grad], [half.kernel])


def step_on_tensorflow(half, x, y, optimizer):
    import tensorflow as tf

    half.average.assign(0.5 * half.average + 0.5 * tf.reduce_mean(x, 0))
    kernel = _native(half.kernel)
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(tf.reduce_mean((x @ kernel - y) ** 2))
    gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [kernel]))
    optimizer.apply_gradients([(gradients[0], half.kernel)])


class TwoParts(keras.Model):
    """Trains its halves with an optimizer each, of which one may overflow alone."""

    def __init__(self):
        super().__init__()
        self.halves = [Half(), Half()]
        rules = [lossscale.DynamicScale(initial_scale=2.0**10) for _ in self.halves]
        self.optimizers_of_halves = list(map(wrapped, rules))

    def call(self, x):
        return x

    def train_step(self, data):
        step = step_on_torch if BACKEND == "torch" else step_on_tensorflow
        for half, x, optimizer in zip(
            self.halves, (data[0][:, :3], data[0][:, 3:]), self.optimizers_of_halves, strict=True
        ):
            step(half, x, data[1], optimizer)
        return {"loss": data[1][0, 0]}


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` passes the variables of one optimizer")
@pytest.mark.parametrize("are_named", [False, True])
def test_a_skip_of_either_optimizer_puts_the_statistics_back(are_named, monkeypatch):
    arguments = {"jit_compile": False, "run_eagerly": are_named}
    if BACKEND == "torch":
        import torch

        # Traced as ever, but to C++ in test_compile.py of PyTorch alone only.
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        arguments["jit_compile"] = not are_named
    keras.mixed_precision.set_global_policy("float32")
    x, y = rows(3, spoiled=())
    x = np.concatenate([x, x], axis=1)
    x[ROWS : 2 * ROWS, 3:] = np.nan
    ends = []
    for data in ((x, y), without(x, y, spoiled=[1])):
        model = TwoParts()
        guard(model, *(model.optimizers_of_halves if are_named else ()))
        model.compile(**arguments)
        # Of PyTorch's compiler.
        with warnings.catch_warnings(action="ignore"):
            model.fit(*data, batch_size=ROWS, shuffle=False, verbose=0)
        ends.append(weights(model.halves[1]))
        batches = len(data[0]) // ROWS
        for skipped, optimizer in zip((0, batches - 2), model.optimizers_of_halves, strict=True):
            found = status(optimizer)
            assert (found.scale, found.skipped) == (2.0 ** (10 - skipped), skipped)
            assert (found.iterations, found.applied) == (batches, batches - skipped)
        assert all(np.isfinite(each).all() for each in weights(model))
    # Without the batch that the second half has skipped.
    assert_same(*ends)


@pytest.mark.skipif(BACKEND != "jax", reason="others follow any optimizer")
def test_an_optimizer_whose_variables_fit_does_not_pass_is_refused_on_jax():
    model = compiled(guard(small(), wrapped()))
    with pytest.raises(NotImplementedError, match="compiled with the optimizer whose skips count"):
        model.fit(*rows(1, spoiled=()), batch_size=ROWS, verbose=0)


# --- What is followed, and what is not ------------------------------------------------------------


def test_metrics_and_random_layers_go_on():
    class Seen(keras.metrics.Sum):
        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(1.0)

    def draws(model):
        # The state is two numbers; the second counts the draws.
        return array(model.get_layer("dropout").seed_generator.state)[-1]

    model, unskipped = (small(extra=[layers.Dropout(0.5, seed=1, name="dropout")]) for _ in "12")
    compiled(guard(model), metrics=[Seen(name="seen")], jit_compile=False)
    history = model.fit(*rows(), batch_size=ROWS, shuffle=False, verbose=0).history
    assert history["seen"] == [6]
    if KERAS == "keras":
        fit(unskipped, rows(spoiled=()))
        assert draws(model) == draws(unskipped)


def test_train_on_batch_a_guard_after_compile_and_what_is_set_between_steps():
    model = guard(compiled(small(), jit_compile=False, run_eagerly=False))
    x, y = rows(2, spoiled=[1])
    model.train_on_batch(x[:ROWS], y[:ROWS])
    model.layers[2].moving_mean.assign([5.0, 6.0, 7.0, 8.0])
    before = weights(model)
    model.train_on_batch(x[ROWS:], y[ROWS:])
    assert skips(model) == 1
    assert_same(weights(model), before)


def test_a_second_guard_replaces_the_first_and_copies_and_files_have_none(tmp_path):
    model = small()
    own = model.train_step
    guard(guard(model))
    assert model.train_step.step == own
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = weights(model)
        fit(again, rows(1, spoiled=()))
        assert_same(weights(model), before)
    late = guard(Late())
    fit(copy.deepcopy(late), rows(1, spoiled=()))
    assert not late.built
    found = fit(model, rows(1, spoiled=()))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(weights(loaded), found)
    assert "train_step" not in vars(loaded)


def test_a_guard_without_an_optimizer_to_follow_warns_and_a_fixed_scale_is_no_mistake():
    model = compiled(guard(small()), wrapped(lossscale.FixedScale(16)), jit_compile=False)
    data = rows(1, spoiled=())
    with warnings.catch_warnings(action="error", category=LossScaleWarning):
        model.fit(*data, batch_size=ROWS, verbose=0)
    keras.mixed_precision.set_global_policy("float32")
    compiled(model := guard(small()), "sgd", jit_compile=False)
    message = r"needs a LossScaleOptimizer, .* is <(tf_)?keras\."
    with pytest.warns(LossScaleWarning, match=message):
        model.fit(*data, batch_size=ROWS, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (SGD(),), "`model` must be a keras.Model"),
        (lambda: (small(), SGD()), "`optimizers` must be the LossScaleOptimizers"),
        (lambda: (small(), [wrapped()]), "Received: list"),
    ],
)
def test_what_cannot_be_guarded_is_refused_and_nothing_changes(arguments, message):
    given = arguments()
    with pytest.raises(ArgumentTypeError, match=message):
        guard(*given)
    assert "train_step" not in vars(given[0])

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
from kerases import assert_same, status, values
from lossscale.errors import ArgumentTypeError, LossScaleWarning
from seeding import seed

if KERAS == "none":
    pytest.skip("about Keras", allow_module_level=True)

keras = importlib.import_module(KERAS)
framework = importlib.import_module(BACKEND)
guard = importlib.import_module(f"lossscale.{KERAS}").guard
layers, SGD = keras.layers, keras.optimizers.SGD
ON_TENSORFLOW = BACKEND not in ("jax", "torch")
ROWS, SPOILED = 4, (1, 2)
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


def rows(batches=4, spoiled=SPOILED):
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
    return values(model.weights)


SEVERAL = {"steps_per_execution": 2, "run_eagerly": False}
WAYS = {
    "fit": {"run_eagerly": False},
    "own train_step": {"cls": OwnStep, "run_eagerly": BACKEND != "jax"},
    **({} if BACKEND == "torch" else {"several a call": SEVERAL}),
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
    # JAX rounds the plain program in another way.
    assert_same(found, never_given(cls, BACKEND == "jax", **arguments))
    assert status(guarded.optimizer).skipped == len(SPOILED)


def test_a_guard_changes_nothing_without_a_skip_and_much_with_one():
    settings = {"run_eagerly": ON_TENSORFLOW}
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
    assert status(model.optimizer).skipped == 1
    assert np.isfinite(found[4]).all()
    seen = array(first(x[ROWS:])).astype("float32")
    # Momentum 0.99, and one batch.
    assert array(norm.moving_mean).shape == (4,)
    assert np.abs(array(norm.moving_mean)).max() < np.abs(seen).max() * 0.02


def _native(variable):
    return getattr(variable, "_value", variable)


# --- Several optimizers ---------------------------------------------------------------------------


@pytest.mark.skipif(BACKEND == "jax", reason="whose `fit` keeps no state")
def test_the_states_of_recurrent_layers():
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
        ends.append(fit(model, (data[0][:, None], data[1]), run_eagerly=True))
    assert_same(*ends)


class Half(layers.Layer):
    """Has an average of what it has seen; few calls of Keras are quick to trace."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(3, 1), initializer="ones")
        self.average = self.add_weight(shape=(3,), initializer="zeros", trainable=False)
        self.built = True

    def call(self, x):
        average = _native(self.average)
        write = average.copy_ if BACKEND == "torch" else average.assign
        write(0.5 * average + 0.5 * mean(x, 0))
        return x @ _native(self.kernel)


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
        (x, y), (one, other) = data, self.halves
        trained(one, self.optimizers_of_halves[0], lambda: squares(one.call(x[:, :3]), y))
        trained(other, self.optimizers_of_halves[1], lambda: squares(other.call(x[:, 3:]), y))
        return {"loss": y[0, 0]}


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` passes the variables of one optimizer")
@pytest.mark.parametrize("are_named", [False, True])
def test_a_skip_of_either_optimizer_puts_the_statistics_back(are_named, monkeypatch):
    arguments = {"run_eagerly": are_named}
    if BACKEND == "torch":
        import torch

        # Traced as ever, but to C++ in test_compile.py of PyTorch alone only.
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    keras.mixed_precision.set_global_policy("float32")
    x, y = rows(3, spoiled=())
    x = np.concatenate([x, x], axis=1)
    x[ROWS : 2 * ROWS, 3:] = np.nan
    ends = []
    for data in ((x, y), without(x, y, spoiled=[1])):
        model = TwoParts()
        guard(model, *(model.optimizers_of_halves if are_named else ()))
        # Tracing takes long. The run to compare with rounds alike.
        arguments["jit_compile"] = BACKEND == "torch" and not are_named and not ends
        model.compile(**arguments)
        # Of PyTorch's compiler.
        with warnings.catch_warnings(action="ignore"):
            model.fit(*data, batch_size=ROWS, shuffle=False, verbose=0)
        ends.append(values(model.halves[1].weights))
        batches = len(data[0]) // ROWS
        for skipped, optimizer in zip((0, batches - 2), model.optimizers_of_halves, strict=True):
            found = status(optimizer)
            assert (found.scale, found.skipped) == (2.0 ** (10 - skipped), skipped)
            assert (found.iterations, found.applied) == (batches, batches - skipped)
        assert all(np.isfinite(each).all() for each in values(model.weights))
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
    assert history["seen"] == [4]
    if KERAS == "keras":
        fit(unskipped, rows(spoiled=()))
        assert draws(model) == draws(unskipped)


def test_train_on_batch_a_guard_after_compile_and_what_is_set_between_steps():
    model = guard(compiled(small(), jit_compile=False, run_eagerly=False))
    x, y = rows(2, spoiled=[1])
    model.train_on_batch(x[:ROWS], y[:ROWS])
    model.layers[2].moving_mean.assign([5.0, 6.0, 7.0, 8.0])
    before = values(model.weights)
    model.train_on_batch(x[ROWS:], y[ROWS:])
    assert status(model.optimizer).skipped == 1
    assert_same(values(model.weights), before)


def test_a_second_guard_replaces_the_first_and_copies_and_files_have_none(tmp_path):
    model = small()
    own = model.train_step
    guard(guard(model))
    assert model.train_step.step == own
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = values(model.weights)
        fit(again, rows(1, spoiled=()))
        assert_same(values(model.weights), before)
    late = guard(Late())
    fit(copy.deepcopy(late), rows(1, spoiled=()))
    assert not late.built
    found = fit(model, rows(1, spoiled=()))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(values(loaded.weights), found)
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
    ("arguments", "step", "message"),
    [
        (lambda: (SGD(),), {}, "`model` must be a keras.Model"),
        (lambda: (small(), SGD()), {}, "`optimizers` must be the LossScaleOptimizers"),
        (lambda: (small(), [wrapped()]), {}, "Received: list"),
        (lambda: (small(),), {"step": print}, "`step` must be .* 0 optimizers"),
        (lambda: (small(), wrapped()), {"step": 1}, "`step` must be .* a step of type int"),
    ],
)
def test_what_cannot_be_guarded_is_refused_and_nothing_changes(arguments, step, message):
    given = arguments()
    with pytest.raises(ArgumentTypeError, match=message):
        guard(*given, **step)
    assert "train_step" not in vars(given[0])


# --- A function of a custom loop ------------------------------------------------------------------

pure = pytest.mark.skipif(BACKEND == "jax", reason="where a step is a pure function")
HOWS = ["eager"] if BACKEND == "torch" else ["eager", "tf.function", "XLA"]


def trained(model, optimizer, loss_of, models=()):
    """Trains a model by the loop of its framework; returns the loss."""
    variables = model.trainable_variables
    if BACKEND == "torch":
        loss = loss_of()
        optimizer.scale_loss(loss).backward()
        optimizer.apply([each.value.grad for each in variables], variables)
        for each in (each for part in (model, *models) for each in part.trainable_variables):
            each.value.grad = None
        return loss.detach()
    with framework.GradientTape() as tape:
        loss = loss_of()
        scaled = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, [_native(each) for each in model.trainable_variables])
    gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def mean(x, axis=None):
    return x.mean(axis) if BACKEND == "torch" else framework.reduce_mean(x, axis)


def squares(found, target=1.0):
    return mean((found - target) ** 2)


def batches(x, y):
    convert = framework.from_numpy if BACKEND == "torch" else framework.constant
    starts = range(0, len(x), ROWS)
    return [(convert(x[at : at + ROWS]), convert(y[at : at + ROWS])) for at in starts]


def called(step, how):
    return step if how == "eager" else framework.function(step, jit_compile=how == "XLA")


def some_units():
    """Batches that overflow in some units; in others they are large and finite."""
    x, y = rows(spoiled=())
    sums = array(small().layers[1].kernel).sum(0)
    value = 6.6e4 / np.abs(sums).max()
    x[[row for row in range(len(x)) if row // ROWS in SPOILED]] = value
    assert value < 6.5e4
    assert np.abs(value * sums).min() < 6e4
    return x, y


FORMS = {
    "batch": (lambda batch: batch[0], lambda batch: ((batch,), {})),
    "arrays": (lambda x, y: x, lambda batch: (batch, {})),
    "second": (lambda number, batch: batch[0], lambda batch: ((7, batch), {})),
    "keywords": (lambda *, more, y: more["x"][0], lambda b: ((), {"more": {"x": [b[0]]}, "y": 1})),
    "iterator": (lambda it: next(it)[0], lambda batch: ((iterator(*batch),), {})),
}


def iterator(x, y):
    if BACKEND == "torch":
        return iter([(x, y)])
    return iter(framework.data.Dataset.from_tensors((x, y)))


def looped(model, data, how="eager", form="arrays"):
    """Trains a guarded model by a function; returns its weights and the number of skips."""
    optimizer, own = wrapped(), model.train_step
    input_of, given = FORMS[form]

    def step(*args, **kwargs):
        x = input_of(*args, **kwargs)
        loss = trained(model, optimizer, lambda: squares(model(x, training=True)))
        return {"loss": loss, "others": [loss, None]}

    run = called(guard(model, optimizer, step=step), how)
    for batch in batches(*data):
        args, kwargs = given(batch)
        results = run(*args, **kwargs)
        assert results["others"][1] is None
    assert model.train_step == own
    return values(model.weights), status(optimizer).skipped


CASES = [(rows, form, "eager") for form in FORMS]
if BACKEND != "torch":
    CASES += [(rows, form, "tf.function") for form in ("batch", "iterator")]
CASES += [(some_units, "arrays", HOWS[-1])]


@functools.cache
def never_looped(how):
    return looped(small(), without(*rows()), how)


@pure
@pytest.mark.parametrize(("data", "form", "how"), CASES)
def test_a_guarded_function_ends_as_one_that_was_never_given_the_skipped_batches(data, form, how):
    found, skipped = looped(small(), data(), how, form)
    expected, none = never_looped(how)
    assert_same(found, expected)
    assert (skipped, none) == (len(SPOILED), 0)


@pure
@pytest.mark.parametrize("nested", [False, True])
def test_a_gan_of_two_models_and_two_optimizers(nested):
    ends = []
    for data in (rows(), without(*rows())):
        seed(0)
        maker, inputs = small(), keras.Input((1,))
        critic = keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(inputs)))
        both, optimizers = [maker, critic], [wrapped(), wrapped()]
        made = functools.partial(lambda x, both: both[1](both[0](x, training=True)), both=both)

        def step(x, y, both=both, optimizers=optimizers, made=made):
            judged = lambda: squares(both[1](y, training=True)) + squares(made(x), 0.0)  # noqa: E731
            trained(both[1], optimizers[1], judged, both)
            trained(both[0], optimizers[0], lambda: squares(made(x)), both)

        if nested:
            guarded = guard(critic, optimizers[1], step=guard(maker, optimizers[0], step=step))
        else:
            guarded = guard(both, *optimizers, step=step)
        for batch in batches(*data):
            guarded(*batch)
        ends.append([each for model in both for each in values(model.weights)])
        skipped = len(SPOILED) if len(ends) == 1 else 0
        assert [status(each).skipped for each in optimizers] == [skipped] * 2
    assert_same(*ends)


@pure
@pytest.mark.parametrize("form", ["arrays", "second", "keywords", "iterator"])
def test_a_model_that_is_built_in_the_first_step_of_a_function(form):
    x, y = rows(2, spoiled=[0])
    if form == "arrays":
        found, skipped = looped(Late(), (x, y), form=form)
        assert skipped == 1
        assert all(np.isfinite(each).all() for each in found)
        return
    message = "first `step` of a guarded model made weights, .* or before the first `step`"
    with pytest.warns(LossScaleWarning, match=message):
        looped(Late(), without(x, y, [0]), form=form)


def half_of(halves, context):
    return halves[context.replica_id_in_sync_group]


@pytest.mark.skipif(not ON_TENSORFLOW, reason="of TensorFlow")
@pytest.mark.parametrize(
    ("inside", "how"), [(True, "eager"), (True, "tf.function"), (False, "eager")]
)
def test_a_function_on_two_replicas(two_replicas, inside, how):
    """Guarded in the function that each replica runs, or around that of all."""
    x, y = rows(spoiled=())
    # Half of a batch for each; only one of them overflows.
    x[4], x[10] = 1e6, 1e6
    ends = []
    for data in ((x, y), without(x, y)):
        with two_replicas.scope():
            model, optimizer = small(), wrapped()
            optimizer.build(model.trainable_variables)

        def step(x, model=model, optimizer=optimizer):
            return trained(model, optimizer, lambda: squares(model(x, training=True)))

        one = guard(model, optimizer, step=step) if inside else step
        run = functools.partial(lambda one, x: two_replicas.run(one, args=(x,)), one)
        run = run if inside else guard(model, optimizer, step=run)
        run = called(run, how)
        for batch, _ in batches(*data):
            of_context = functools.partial(half_of, framework.split(batch, 2))
            run(two_replicas.experimental_distribute_values_from_function(of_context))
        assert status(optimizer).skipped == len(SPOILED) * (len(ends) == 0)
        parts = [two_replicas.experimental_local_results(_native(w)) for w in model.weights]
        ends.append([part.numpy() for each in parts for part in each])
    assert_same(*ends)


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_on_jax_the_error_shows_lines_that_do_the_same():
    import jax
    from jax import numpy as jnp

    with pytest.raises(lossscale.errors.UnsupportedError, match="a pure function") as refused:
        guard(small(), wrapped(), step=lambda: None)
    [first, *lines] = [each.strip() for each in str(refused.value).splitlines() if each[0] == " "]
    ends = []
    for data in (rows(), without(*rows())):
        model, optimizer = small(), wrapped()
        optimizer.build(model.trainable_variables)

        @jax.jit
        def step(trainable, before, optimizer_variables, x, model=model, optimizer=optimizer):
            def loss_of(trainable):
                found, after = model.stateless_call(trainable, before, x, training=True)
                loss = ((found - 1.0) ** 2).mean()
                return optimizer.scale_loss(loss), after

            with keras.StatelessScope(zip(optimizer.variables, optimizer_variables, strict=True)):
                gradients, after = jax.grad(loss_of, has_aux=True)(trainable)
            names = {**locals(), "jnp": jnp}
            exec("\n".join([first, *lines]), names)
            return names["trained"], names["non_trainable"], names["variables"]

        models = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        state = [[variable.value for variable in each] for each in models]
        for x in data[0].reshape(-1, ROWS, 3):
            state = step(*state, x)
        ends.append([np.asarray(each) for group in state[:2] for each in group])
    assert_same(*ends)

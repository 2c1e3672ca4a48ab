"""The monitor in `fit`, on each backend of Keras 3 and on tf_keras.

What it records of the same steps as the monitors of other loops is in test_monitors.py.
"""

import csv
import importlib

import numpy as np
import pytest

import lossscale
from conformance.harness import array
from conformance.wrappers import BACKEND, KERAS
from kerases import assert_same, number
from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning
from records import column, nonfinite, skipped_steps
from seeding import seed

if KERAS == "none":
    pytest.skip("about Keras", allow_module_level=True)

keras = importlib.import_module(KERAS)
IS_KERAS_3 = KERAS == "keras"
pytestmark = pytest.mark.usefixtures("compiled_quickly")

# Compiling a training step takes PyTorch most of a minute.
JIT = [False] if BACKEND == "torch" else [False, True]
SPOILED = "spoiled/kernel"


def arrays(variables):
    return [array(each) for each in (variables() if callable(variables) else variables)]


def rows(batches, spoiled=(), infs=1, nans=0):
    """Returns inputs and targets; the `spoiled` batches of 4 rows spoil one layer's gradients."""
    x = np.random.default_rng(0).normal(size=(4 * batches, 4)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    extra = np.tile(np.float32([[0], [1]]), (4 * batches, 1, 3))
    for batch in spoiled:
        extra[4 * batch, 0, :infs] = 1
        extra[4 * batch, 1, : infs + nans] = 0
    return (x, extra), y


@keras.saving.register_keras_serializable("lossscale.tests")
class Spoiled(keras.layers.Layer):
    """A layer whose gradient, and nothing else, is not finite for some rows.

    Its weights w are zero and stay so, and it returns zero. The derivative of sqrt(w * a + b) is
    infinite for a = 1 and b = 0, and NaN if both are zero.
    """

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3,), initializer="zeros", name="kernel")

    def call(self, x):
        a, b = x[:, 0], x[:, 1]
        roots = (self.kernel * a + b) ** 0.5 - b**0.5
        return sum(roots[:, n : n + 1] for n in range(3))


def net(optimizer=None, rule=None, **compile_arguments):
    """A network with a layer that can be spoiled, compiled.

    To trace a graph takes TensorFlow longer than most tests run it: those who want one say how.
    """
    seed(0)
    x, extra = keras.Input((4,)), keras.Input((2, 3))
    spoiled = Spoiled(name="spoiled")
    hidden, out = (
        keras.layers.Dense(
            units,
            activation=activation,
            name=name,
            kernel_initializer=keras.initializers.GlorotUniform(seed=units),
        )
        for units, activation, name in ((8, "relu", "hidden"), (1, None, "out"))
    )
    total = keras.layers.Add()([out(hidden(x)), spoiled(extra)])
    model = keras.Model([x, extra], total, name="net")
    rule = rule or lossscale.DynamicScale(initial_scale=2.0**10, growth_interval=3)
    inner = optimizer or keras.optimizers.SGD(0.01, momentum=0.9)
    eager = BACKEND == "tensorflow" and not compile_arguments
    given = {"jit_compile": BACKEND == "jax", "run_eagerly": eager, **compile_arguments}
    model.compile(lossscale.LossScaleOptimizer(inner, rule=rule), "mse", **given)
    return model


def fit(model, data, callbacks, **arguments):
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(*data, callbacks=callbacks, **options)


def trained(model):
    """All that training changes, and how often it skipped."""
    return (
        arrays(model.trainable_variables)
        + arrays(model.optimizer.inner_optimizer.variables)
        + [number(model.optimizer.loss_scale), number(model.optimizer.steps_skipped)]
    )


on_tensorflow = pytest.mark.skipif(BACKEND in ("jax", "torch"), reason="of TensorFlow")


@pytest.mark.usefixtures("optimized")
def test_sampling_reads_every_nth_step_and_the_last_skip_before_it(tmp_path, optimizers):
    path, results = tmp_path / "run.jsonl", []
    for callbacks in ([], [LossScaleMonitor(path, every=4)]):
        # What is tracked in a compiled step is the same for both families.
        arguments = {"jit_compile": JIT[-1]} if optimizers is keras.optimizers else {}
        model = net(optimizers.SGD(0.01, momentum=0.9), **arguments)
        fit(model, rows(10, spoiled=[1, 2, 7], infs=2, nans=1), callbacks)
        results.append(trained(model))
    assert_same(*results)
    # The first step and the last one; 3 is the last skip before 4; 8 is both sampled and skipped.
    assert column(path, "step") == [1, 3, 4, 8, 10]
    spoiled = [(SPOILED, 2, 1)]
    assert nonfinite(path) == [[], spoiled, [], spoiled, []]


def test_the_logs_of_a_step_that_is_not_sampled_have_the_numbers_of_the_last_sample():
    skips = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: skips.append(logs["steps_skipped"])
    )
    fit(net(), rows(8, spoiled=range(8)), [LossScaleMonitor(every=4), seen])
    assert skips == [1, 1, 1, 4, 4, 4, 4, 8]


def test_logs_have_the_scale_and_the_skips(tmp_path, capsys):
    table = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    batches = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(
            (logs["loss_scale"], logs["steps_skipped"])
        )
    )
    data = rows(3, spoiled=[1])
    history = fit(net(), data, [LossScaleMonitor(), seen, table], epochs=2, verbose=2)
    scales, skips = [512.0, 256.0], [1, 2]
    assert history.history["loss_scale"] == scales
    assert history.history["steps_skipped"] == skips
    assert batches == [(1024, 0), (512, 1), (512, 1), (512, 1), (256, 2), (256, 2)]
    shown = capsys.readouterr().out
    assert "loss_scale: 256.0000" in shown
    assert "steps_skipped: 2.0000" in shown
    with open(tmp_path / "log.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss_scale"]) for line in lines] == scales
    assert [int(line["steps_skipped"]) for line in lines] == skips


def test_a_bad_batch_is_a_reason_of_its_own_and_only_for_its_step(tmp_path):
    path = tmp_path / "run.jsonl"
    (x, extra), y = rows(4, spoiled=[2])
    y[4:8] = np.nan
    with pytest.warns(LossScaleWarning, match=r"The loss of step 2 is nan, which no loss scale"):
        fit(net(), ((x, extra), y), [LossScaleMonitor(path)])
    # Keras' mean stays NaN, which says nothing of the loss of step 3.
    assert column(path, "reason") == [None, "loss", "unknown", None]
    assert [loss is None for loss in column(path, "loss")] == [False, False, True, True]


def test_a_model_that_was_trained_already_is_watched_too_and_traced_for_it_once():
    # TensorFlow traces for XLA as it does without; JAX without jit runs each step in Python.
    model, monitor, traces = net(jit_compile=BACKEND == "jax"), LossScaleMonitor(), []
    step, seen = model.train_step, []
    model.train_step = lambda *args, **kwargs: traces.append(1) or step(*args, **kwargs)
    for callbacks in ([], [monitor], [monitor]):
        fit(model, rows(3, spoiled=[1]), callbacks, epochs=2)
        seen.append(len(traces))
    assert (monitor.last_record.step, monitor.last_record.steps_skipped) == (18, 6)
    # PyTorch runs each step in Python.
    if BACKEND != "torch":
        assert 0 < seen[1] - seen[0] <= 2
        assert seen[2] == seen[1]


def test_fits_of_one_model_are_one_file_also_from_a_checkpoint_on(tmp_path):
    path, model = tmp_path / "run.jsonl", net()
    monitor = LossScaleMonitor(path)
    for _ in range(2):
        fit(model, rows(3, spoiled=[1]), [monitor])
    assert column(path, "step") == [1, 2, 3, 4, 5, 6]
    assert skipped_steps(path) == [2, 5]
    model.optimizer.iterations = 2
    fit(model, rows(1), [monitor])
    # A step that is repeated has two lines.
    assert column(path, "step") == [1, 2, 3, 4, 5, 6, 3]
    with pytest.raises(ArgumentError, match="which exists"):
        fit(net(), rows(2), [monitor])
    assert len(column(path, "step")) == 7


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch executes one step at a time")
def test_several_steps_per_execution(tmp_path, optimizers):
    path = tmp_path / "run.jsonl"
    model = net(optimizers.SGD(0.01), steps_per_execution=3)
    fit(model, rows(6, spoiled=[1]), [LossScaleMonitor(path)], epochs=2)
    assert column(path, "step") == [2, 3, 6, 8, 9, 12]
    spoiled = [(SPOILED, 1, 0)]
    assert nonfinite(path) == [spoiled, [], [], spoiled, [], []]
    assert column(path, "steps_skipped") == [1, 1, 1, 2, 2, 2]


def test_what_is_watched_is_not_saved(tmp_path, recwarn):
    data = rows(3, spoiled=[1])
    monitored, plain = net(), net()
    fit(monitored, data, [LossScaleMonitor(tmp_path / "run.jsonl")])
    fit(plain, data, [])
    assert_same(monitored.optimizer.get_weights(), plain.optimizer.get_weights())
    plain.optimizer.set_weights(monitored.optimizer.get_weights())
    monitored.optimizer.set_weights(plain.optimizer.get_weights())
    for source, target in ((monitored, net()), (plain, monitored)):
        path = tmp_path / f"{id(target)}.weights.h5"
        source.save_weights(path)
        target.optimizer.build(target.trainable_variables)
        target.load_weights(path)
        assert number(target.optimizer.steps_skipped) == 1
        inner = (each.optimizer.inner_optimizer.variables for each in (source, target))
        assert_same(*map(arrays, inner))
    monitored.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert len(again.optimizer.variables) == len(plain.optimizer.variables)
    assert not [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras runs all callbacks in line there")
def test_a_monitor_beside_the_training_step_is_refused():
    with pytest.raises(Exception, match=r"Pass `callbacks=\[monitor\]`"):
        fit(net(), rows(4), LossScaleMonitor())


def test_a_model_without_our_loss_scaling():
    x, y = rows(1)[0][0], rows(1)[1]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ArgumentError, match="Wrap the optimizer before compile"):
        model.fit(x, y, verbose=0, callbacks=[LossScaleMonitor()])
    own = keras.optimizers if IS_KERAS_3 else keras.mixed_precision
    model.compile(own.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ArgumentError, match="Wrap the optimizer before compile"):
        model.fit(x, y, verbose=0, callbacks=[LossScaleMonitor()])


class Parts(keras.Model):
    """Trains a variable with each of two optimizers; a batch overflows one of them, as it says."""

    def compile(self, d, g):
        super().compile(run_eagerly=True)
        self.d, self.g = d, g
        new = keras.Variable if IS_KERAS_3 else importlib.import_module("tensorflow").Variable
        kept = [new(np.zeros(2, "float32")) for _ in "dg"]
        # Not of the model: while `fit` runs on JAX, its variables have no values.
        self.kept = lambda: kept

    def call(self, x):
        return x

    def train_step(self, *given):
        which = float(array(given[-1]).max())
        for place, variable in enumerate(self.kept(), start=1):
            optimizer = [self.d, self.g][place - 1]
            optimizer.get_scaled_loss(1.0)
            gradient = 0 * variable + (np.inf if which == place else 1.0)
            gradients = optimizer.get_unscaled_gradients([gradient])
            optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        logs = {"d_loss": 1.0, "g_loss": 2.0}
        return (logs, given[0]) if BACKEND == "jax" else logs


def two_parts(optimizers=keras.optimizers):
    model = Parts(name="parts")
    d, g = (lossscale.LossScaleOptimizer(optimizers.SGD(), initial_scale=n) for n in (8.0, 64.0))
    model.compile(d, g)
    return model


WHICH = np.float32([[0], [1], [2], [2]])


def test_each_of_several_optimizers_has_a_monitor(tmp_path, optimizers):
    model = two_parts(optimizers)
    paths = [tmp_path / name for name in "dg"]
    monitors = [LossScaleMonitor(p, optimizer=getattr(model, p.name), name=p.name) for p in paths]
    history = fit(model, [WHICH], monitors, batch_size=1).history
    assert set(history) == {
        f"{n}_{s}" for n in "dg" for s in ("loss", "loss_scale", "steps_skipped")
    }
    assert [history["d_loss_scale"], history["g_loss_scale"]] == [[4.0], [16.0]]
    assert [history["d_steps_skipped"], history["g_steps_skipped"]] == [[1], [2]]
    assert [skipped_steps(path) for path in paths] == [[2], [3, 4]]
    assert [column(path, "loss") for path in paths] == [[1.0] * 4, [2.0] * 4]


def test_a_monitor_does_not_search_the_attributes_of_a_model(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ArgumentError, match=r"several optimizers.*LossScaleMonitor\(optimizer="):
        fit(two_parts(), [WHICH], [LossScaleMonitor(path)], batch_size=1)
    assert not path.exists()
    for wrong in ({"optimizer": keras.optimizers.SGD()}, {"name": 1}):
        with pytest.raises(ArgumentTypeError, match=f"`{next(iter(wrong))}` must be a"):
            LossScaleMonitor(**wrong)


@on_tensorflow
def test_what_replicas_have_is_counted_together_and_once(two_replicas, tmp_path, optimizers):
    # Of a batch of 8 rows each replica gets four: after a step without an overflow there is one on
    # the first, one on the second, and one on both.
    data, path, results = rows(8, spoiled=[2, 5, 6, 7], infs=2), tmp_path / "run.jsonl", []
    for callbacks in ([], [LossScaleMonitor(path)]):
        with two_replicas.scope():
            arguments = {"jit_compile": False} if optimizers is keras.optimizers else {}
            model = net(optimizers.SGD(0.01), **arguments)
        fit(model, data, callbacks, batch_size=8)
        results.append(trained(model))
    assert_same(*results)
    assert column(path, "scale") == [1024.0, 1024.0, 512.0, 256.0]
    *steps, [(name, infs, nans)] = nonfinite(path)
    assert steps == [[], [(SPOILED, 2, 0)], [(SPOILED, 2, 0)]]
    # tf_keras counts in the sum over the replicas.
    assert (name, infs + nans) == (SPOILED, 4 if IS_KERAS_3 else 2)


@on_tensorflow
def test_tensorflow_saves_what_it_saves_of_a_run_without_a_monitor(tmp_path, optimizers):
    import tensorflow as tf

    monitored, plain = (net(optimizers.Adam(0.01)) for _ in ("monitored", "plain"))
    fit(monitored, rows(3, spoiled=[1]), [LossScaleMonitor(tmp_path / "run.jsonl")])
    fit(plain, rows(3), [])
    for source, target in ((monitored, plain), (plain, monitored)):
        saved = tf.train.Checkpoint(model=source).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(model=target).restore(saved).assert_consumed()
        assert_same(*(arrays(each.optimizer.variables) for each in (source, target)))
    if IS_KERAS_3:
        monitored.export(tmp_path / "saved", verbose=False)
    else:
        monitored.save(tmp_path / "saved", save_format="tf")
    of_model = str(tmp_path / "saved/variables/variables")
    names = [name for path in (saved, of_model) for name, _ in tf.train.list_variables(path)]
    assert len(names) > 8
    assert not [name for name in names if "track" in name]


@on_tensorflow
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": False}], ids=str)
def test_a_model_that_gets_its_shape_in_fit(tmp_path, mode):
    (_, extra), y = rows(3, spoiled=[1])
    layers = [Spoiled(name="spoiled"), keras.layers.Dense(1)]
    model = keras.Sequential(layers, name="net")
    model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse", **mode)
    fit(model, (extra, y), [LossScaleMonitor(tmp_path / "run.jsonl")])
    name = f"{'net/' * IS_KERAS_3}{SPOILED}"
    assert nonfinite(tmp_path / "run.jsonl") == [[], [(name, 1, 0)], []]


@on_tensorflow
def test_sparse_gradients_are_counted_as_they_are_stored(tmp_path):
    layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3, name="words")]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
    data = np.zeros((8, 2), "int32"), np.full((8, 1), np.inf, "float32")
    with pytest.warns(UserWarning, match="loss of step 1 is inf"):
        fit(model, data, [LossScaleMonitor(tmp_path / "run.jsonl")], batch_size=8)
    [tensors] = nonfinite(tmp_path / "run.jsonl")
    [counts] = [counts for name, *counts in tensors if "words" in name]
    assert sum(counts) == 8 * 2 * 3


@pytest.mark.skipif(KERAS != "keras" or BACKEND != "tensorflow", reason="both are loaded there")
def test_a_model_of_the_other_generation_is_refused():
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(
        ArgumentError, match=r"lossscale\.tf_keras\.LossScaleMonitor for one of tf_keras"
    ):
        fit(model, (np.ones((1, 1)), np.ones((1, 1))), [LossScaleMonitor()])

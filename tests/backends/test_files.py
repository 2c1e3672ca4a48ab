"""A model saved under one backend goes on under another."""

import fcntl
import json
import os
import pathlib

import keras
import numpy as np
import pytest

from backends.support import BACKEND, arrays, data, model_with, run, status, wrapped

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WRITER = """
import json, sys
import keras, numpy as np
from backends.support import arrays, data, model_with, status, wrapped

path = sys.argv[1]
optimizer = wrapped(keras.optimizers.Adam(0.01))
model = model_with(optimizer)
x, y = data(40)
x[24:32] = np.nan
model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
model.save(path + ".keras")
model.save_weights(path + ".weights.h5")
before = status(optimizer)
np.savez(path + "-state.npz", *arrays(model.trainable_variables), *arrays(optimizer.variables))
model.fit(*data(24, seed=1), batch_size=8, shuffle=False, verbose=0)
np.savez(path + "-later.npz", *arrays(model.trainable_variables))
print(json.dumps([before, status(optimizer)]))
"""


def read(path):
    with np.load(path) as file:
        return [file[name] for name in file.files]


@pytest.fixture(scope="module", params=["tensorflow", "jax", "torch"])
def written(request, tmp_path_factory):
    """Files that a backend wrote, once for all processes of a run of `tests/run.py`."""
    shared = os.environ.get("LOSSSCALE_TEST_SHARED")
    folder = pathlib.Path(shared) if shared else tmp_path_factory.mktemp("files")
    path = folder / request.param
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        printed = pathlib.Path(f"{path}.json")
        if not printed.exists():
            lines = run(WRITER, request.param, path).strip().splitlines()
            printed.write_text(lines[-1])
    return path, *json.loads(printed.read_text())


@pytest.mark.parametrize("format_", ["keras", "weights.h5"])
def test_training_resumes_where_it_was(written, format_):
    path, before, later = written
    if format_ == "keras":
        model = keras.models.load_model(f"{path}.keras")
        if BACKEND == "torch":
            # The file of another backend asks for it, and PyTorch's compiler takes half a minute.
            model.jit_compile = False
    else:
        model = model_with(wrapped(keras.optimizers.Adam(0.01)))
        model.optimizer.build(model.trainable_variables)
        model.load_weights(f"{path}.weights.h5")
    optimizer = model.optimizer
    assert status(optimizer) == before
    assert before["skipped"] == 1
    found = arrays(model.trainable_variables) + arrays(optimizer.variables)
    for value, saved in zip(found, read(f"{path}-state.npz"), strict=True):
        np.testing.assert_array_equal(value, saved)
    model.fit(*data(24, seed=1), batch_size=8, shuffle=False, verbose=0)
    assert status(optimizer) == later
    for value, saved in zip(
        arrays(model.trainable_variables), read(f"{path}-later.npz"), strict=True
    ):
        np.testing.assert_allclose(value, saved, rtol=2e-4, atol=1e-6)


def test_weights_go_from_a_plain_optimizer_into_a_wrapped_one_and_back(tmp_path):
    plain = model_with(keras.optimizers.Adam(0.01))
    plain.fit(*data(), batch_size=8, verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = model_with(wrapped(keras.optimizers.Adam(0.01)))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "plain.weights.h5")
    for value, saved in zip(
        arrays(model.optimizer.inner_optimizer.variables),
        arrays(plain.optimizer.variables),
        strict=True,
    ):
        np.testing.assert_array_equal(value, saved)
    assert status(model.optimizer)["iterations"] == 8
    model.save_weights(tmp_path / "wrapped.weights.h5")
    again = model_with(keras.optimizers.Adam(0.01))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "wrapped.weights.h5")
    for value, saved in zip(
        arrays(again.optimizer.variables), arrays(plain.optimizer.variables), strict=True
    ):
        np.testing.assert_array_equal(value, saved)


def test_a_file_of_keras_own_class_is_read(tmp_path):
    own = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=3
    )
    saved = model_with(own)
    saved.fit(*data(), batch_size=8, verbose=0)
    saved.save_weights(tmp_path / "own.weights.h5")
    model = model_with(wrapped(keras.optimizers.Adam(0.01)))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "own.weights.h5")
    assert status(model.optimizer)["scale"] == 2.0**12
    assert status(model.optimizer)["good_steps"] == 2
    assert status(model.optimizer)["iterations"] == 8
    for value, expected in zip(
        arrays(model.optimizer.inner_optimizer.variables),
        arrays(own.inner_optimizer.variables),
        strict=True,
    ):
        np.testing.assert_array_equal(value, expected)


def test_set_weights_takes_all_variables():
    optimizer = wrapped(keras.optimizers.Adam(0.01))
    model = model_with(optimizer)
    model.fit(*data(), batch_size=8, verbose=0)
    other = wrapped(keras.optimizers.Adam(0.01))
    other.build(model.trainable_variables)
    other.set_weights(arrays(optimizer.variables))
    assert status(other) == status(optimizer)
    for value, expected in zip(arrays(other.variables), arrays(optimizer.variables), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_building_twice_adds_no_variable():
    optimizer = wrapped(keras.optimizers.Adam(0.01))
    variables = [keras.Variable([1.0, 2.0])]
    optimizer.build(variables)
    before = [id(variable) for variable in optimizer.variables]
    optimizer.build(variables)
    assert [id(variable) for variable in optimizer.variables] == before


def test_a_counter_above_a_shorter_interval_grows_the_scale():
    optimizer = wrapped(keras.optimizers.SGD(0.01), growth_interval=10)
    variable = keras.Variable([1.0])
    optimizer.step_counter.assign(20)
    optimizer.apply([optimizer.scale_loss(keras.ops.ones((1,)))], [variable])
    assert status(optimizer)["scale"] == 2.0**11
    assert status(optimizer)["good_steps"] == 0


def test_the_backend_is_the_one_that_was_asked_for():
    assert os.environ["KERAS_BACKEND"] == BACKEND

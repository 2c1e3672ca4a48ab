"""A model that was saved under one backend goes on under another."""

import fcntl
import json
import os
import pathlib

import keras
import numpy as np
import pytest

from backends.support import (
    BACKEND,
    Status,
    arrays,
    assert_same,
    data,
    model_with,
    run,
    status,
    wrapped,
)

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
    return path, *(Status(*numbers) for numbers in json.loads(printed.read_text()))


@pytest.mark.parametrize("format_", ["keras", "weights.h5"])
def test_training_resumes_where_it_was(written, format_):
    path, before, later = written
    is_exact = path.name == BACKEND == "tensorflow"
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
    assert before.skipped == 1
    assert_same(
        arrays(model.trainable_variables) + arrays(optimizer.variables), read(f"{path}-state.npz")
    )
    model.fit(*data(24, seed=1), batch_size=8, shuffle=False, verbose=0)
    assert status(optimizer) == later
    for value, saved in zip(
        arrays(model.trainable_variables), read(f"{path}-later.npz"), strict=True
    ):
        # Other backends, and other compilers of JAX, round otherwise.
        tolerance = {"rtol": 0} if is_exact else {"rtol": 2e-4, "atol": 1e-6}
        np.testing.assert_allclose(value, saved, **tolerance)

"""What has to be settled before any test module imports a framework."""

import atexit
import gc
import importlib
import logging
import os
import tempfile

import hypothesis
import pytest

from benchmarks import xla_gpu
from compile_options import compiling_quickly
from forks import AT_IMPORT
from simulated_cuda import device as simulated_cuda

# Each is read once, while the framework is imported. A value from outside wins.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras":
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.update({**AT_IMPORT, **os.environ})
# Many tests make the same model anew, whose step JAX would compile once more each time.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Not kept: what another run compiled must not be needed, nor hide anything.
    _compiled = tempfile.TemporaryDirectory(prefix="lossscale-jax-", ignore_cleanup_errors=True)
    atexit.register(_compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
SIMULATED_CUDA = "LOSSSCALE_TEST_SIMULATED_CUDA" in os.environ
if SIMULATED_CUDA:
    # Before anything imports PyTorch.
    simulated_cuda.start()
XLA_GPU = "LOSSSCALE_TEST_XLA_GPU" in os.environ
if XLA_GPU:
    # Before anything imports JAX.
    xla_gpu.prepare()

# An example on a busy machine takes as long as it takes.
hypothesis.settings.register_profile("lossscale", deadline=None, print_blob=True)
hypothesis.settings.load_profile("lossscale")


@pytest.fixture(autouse=True)
def _tensorflow_logs():
    """What TensorFlow logs during a test; that it cannot translate our code is a failure."""
    messages = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("tensorflow")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    # Functions of the tests themselves may be written in ways that it does not know.
    first_lines = [m.splitlines()[0] for m in messages if "AutoGraph could not" in m]
    own = ("<locals>", "<function <lambda>")
    assert not [line for line in first_lines if not any(part in line for part in own)]


@pytest.fixture
def compiled_quickly(request):
    """JAX compiles in less time what then runs slower.

    Not for tests that promise bits: a user's program is optimized, and may round otherwise. In a
    module where the others compile quickly these use `optimized`.
    """
    if "optimized" in request.fixturenames:
        yield
        return
    with compiling_quickly():
        yield


@pytest.fixture
def optimized():
    """What promises bits has them of programs that are optimized as a user's are."""


_FAMILIES = ["new", "legacy"] if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras" else ["new"]


@pytest.fixture(params=_FAMILIES)
def optimizers(request):
    """Each family of optimizers of this process' Keras in turn."""
    keras = importlib.import_module(os.environ.get("LOSSSCALE_TEST_KERAS", "keras"))
    return keras.optimizers if request.param == "new" else keras.optimizers.legacy


@pytest.fixture
def two_replicas():
    """A strategy of two replicas."""
    import two_devices

    return two_devices.strategy()


def pytest_collection_modifyitems(items):
    on_a_gpu = os.environ.get("LOSSSCALE_TEST_DEVICE") == "cuda"
    for item in items:
        for name in {item.name, getattr(item, "originalname", "")} if SIMULATED_CUDA else ():
            if why := simulated_cuda.CANNOT.get(name):
                item.add_marker(pytest.mark.skip(why))
        runs = SIMULATED_CUDA or (on_a_gpu and item.path.name in simulated_cuda.ON_EACH_GPU)
        if "/simulated_cuda/" in item.path.as_posix() and not runs:
            item.add_marker(pytest.mark.skip("tests/run.py runs it on a simulated device"))
        if not XLA_GPU and "/xla_gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip("tests/run.py runs it with XLA's compiler for GPUs"))


def pytest_collection_finish():
    # What is imported stays. To look through it for garbage, as some tests and Keras do, takes a
    # third of a second each time.
    gc.collect()
    gc.freeze()

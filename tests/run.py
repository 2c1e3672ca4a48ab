"""Runs the tests of every backend, several processes at a time.

Keras fixes its backend when it is imported, so each backend needs processes of its own. One queue
for all of them keeps every core busy to the end. Of a job that passes the last lines are shown, of
one that fails everything; the status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import multiprocessing.pool
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from forks import Program
from simulated_cuda import device as simulated_cuda

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks import xla_gpu  # noqa: E402

TENSORFLOW = {"KERAS_BACKEND": "tensorflow"}
TF_KERAS = {**TENSORFLOW, "LOSSSCALE_TEST_KERAS": "tf_keras", "TF_USE_LEGACY_KERAS": "1"}
JAX = {"KERAS_BACKEND": "jax"}
TORCH = {"KERAS_BACKEND": "torch"}

# What runs the programs of its own backend.
PROGRAMS = ("tests/docs", "tests/benchmarks/test_command.py")
# XLA's newer emitters and its threads take most of the time of whatever is compiled once. Here that
# is much, and the older ones serve; tests/frameworks/keras has XLA as users have it.
ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
EMITTERS = {"XLA_FLAGS": f"--xla_cpu_use_fusion_emitters=false {ONE_PART}"}
# What runs on TensorFlow is in few parts: each process imports its framework anew, which takes as
# long as many tests.
EACH_BACKEND = ("tests/conformance", "tests/backends", *PROGRAMS)
KERAS_3 = ("tests/frameworks/keras", "tests/documented_interface")
# These run in processes that never import Keras, which a test in each shows.
JAX_ALONE, TORCH_ALONE = "tests/frameworks/jax", "tests/frameworks/torch"
# What XLA's compiler for GPUs compiles.
FOR_GPUS = "tests/xla_gpu"
# What runs on a CUDA device that is simulated.
SIMULATED = (
    "tests/simulated_cuda",
    *(
        f"tests/frameworks/torch/test_{name}.py"
        for name in ("devices", "clipping", "buffers", "explain", "master_weights")
    ),
    *(
        f"tests/conformance/test_{name}.py"
        for name in ("device", "promises", "what_rules_see", "random_programs", "arguments")
    ),
)
# All that is in none of them.
_IGNORED = [
    f"--ignore={path}"
    for path in (*EACH_BACKEND, *KERAS_3, JAX_ALONE, TORCH_ALONE, SIMULATED[0], FOR_GPUS)
]

ON_SIMULATED_CUDA = "torch, a simulated CUDA device"
WITH_XLA_GPU = "jax, XLA's compiler for GPUs"
# Parts that not every machine can run, and what says why.
OPTIONAL = {ON_SIMULATED_CUDA: simulated_cuda.why_not, WITH_XLA_GPU: xla_gpu.why_not}
# Set where a part that cannot run is a failure.
DEMAND = "LOSSSCALE_TEST_DEMAND_ALL"

# Processes of pytest: what selects the backend, what they run, and what they find imported
# (tests/forks.py). In an order in which all cores come to an end together, whether two parts run at
# a time or three; with the longest first, one of two cores would wait half a minute for the last.
ALL = {
    "tensorflow": ({**TENSORFLOW, **EMITTERS}, EACH_BACKEND, "keras"),
    "tensorflow, Keras 3": (TENSORFLOW, KERAS_3, "keras"),
    "tf_keras": (
        {**TF_KERAS, **EMITTERS},
        ("tests/conformance", "tests/frameworks/tf_keras", "tests/strangers", *PROGRAMS[1:]),
        "tf_keras",
    ),
    "torch without Keras": (TORCH, (TORCH_ALONE,), "torch"),
    "jax without Keras": (JAX, (JAX_ALONE,), "jax"),
    "jax": (JAX, EACH_BACKEND, "keras"),
    ON_SIMULATED_CUDA: (
        {
            **TORCH,
            "LOSSSCALE_TEST_KERAS": "none",
            "LOSSSCALE_TEST_DEVICE": "cuda",
            "LOSSSCALE_TEST_SIMULATED_CUDA": "1",
        },
        SIMULATED,
        None,
    ),
    WITH_XLA_GPU: ({**JAX, "LOSSSCALE_TEST_XLA_GPU": "1"}, (FOR_GPUS,), None),
    "torch": (TORCH, EACH_BACKEND, "keras"),
    "tensorflow, all else": ({**TENSORFLOW, **EMITTERS}, ("tests", *_IGNORED), "keras"),
}
# What is tested where only one framework is installed, with `make test FRAMEWORK=torch`.
NO_KERAS = {"LOSSSCALE_TEST_KERAS": "none"}
# The other file has the rows of a Keras only.
PROMISES = ("tests/conformance", "--ignore=tests/conformance/test_every_optimizer.py")
OF_FRAMEWORK = {
    "torch": {
        "torch without Keras": ALL["torch without Keras"],
        "conformance": ({**TORCH, **NO_KERAS}, PROMISES, "torch"),
    },
    "jax": {
        "jax without Keras": ALL["jax without Keras"],
        "conformance": ({**JAX, **NO_KERAS}, PROMISES, "jax"),
    },
    "tensorflow": {
        "Keras 3": ALL["tensorflow, Keras 3"],
        "conformance": ({**TENSORFLOW, **EMITTERS}, ("tests/conformance",), "keras"),
    },
    "tf_keras": {
        "tf_keras": (TF_KERAS, ("tests/conformance", "tests/frameworks/tf_keras"), "tf_keras")
    },
}
QUICK = {
    "torch tests/conformance": (TORCH, ("tests/conformance",), "keras"),
    "tests/core": (TENSORFLOW, ("tests/core",), None),
}


PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
Job = tuple[dict[str, str], tuple[str, ...], str | None]


def run(job: tuple[str, Job]) -> str | None:
    """Runs an item of `ALL` and reports when it ends; returns its name if it failed."""
    name, (environment, arguments, module) = job
    print(f"starts: {name}\n", end="", flush=True)
    start = time.monotonic()
    arguments = ("--color=no", "-p", "no:cacheprovider", *arguments)
    if module:
        done = Program(PYTEST, *arguments, environment=environment, module=module).finished(86400)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    closing = [line.strip("= ") for line in done.stdout.splitlines() if line[:1] == "="]
    last = closing[-1] if closing else "pytest printed no summary"
    failure = f"--- {name}: FAILED\n{done.stdout}{done.stderr}\n" if done.returncode else ""
    # At once, so that what others print does not come in between.
    seconds = time.monotonic() - start
    print(f"{failure}ended: {name} ({seconds:.0f} s): {last}\n", end="", flush=True)
    return name if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the core and one backend only")
    parser.add_argument(
        "--framework", choices=OF_FRAMEWORK, help="what needs no other framework (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: the cores)"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    jobs = QUICK if arguments.quick else OF_FRAMEWORK.get(arguments.framework, ALL)
    left_out = {name: why() for name, why in OPTIONAL.items() if name in jobs and why()}
    jobs = {name: job for name, job in jobs.items() if name not in left_out}
    about = "1 minute" if arguments.quick else "10 minutes on 2 cores"
    print(f"{len(jobs)} parts, {arguments.jobs} at a time, about {about}", flush=True)
    os.chdir(ROOT)
    # The first process keeps the bytecode of our files for all that start later.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Several processes share the cores: threads that wait for one another would spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with (
        tempfile.TemporaryDirectory(
            prefix="lossscale-tests-", ignore_cleanup_errors=True
        ) as shared,
        multiprocessing.pool.ThreadPool(max(arguments.jobs, 1)) as pool,
    ):
        # What one process makes and others read.
        os.environ["LOSSSCALE_TEST_SHARED"] = shared
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(shared, "compiled"))
        failed = [name for name in pool.imap(run, jobs.items()) if name]
    print(f"{time.monotonic() - start:.0f} s in all; failed: {', '.join(failed) or 'none'}")
    for name, why in left_out.items():
        print(f"left out: {name}, because {why}")
    return 1 if failed or (left_out and DEMAND in os.environ) else 0


if __name__ == "__main__":
    sys.exit(main())

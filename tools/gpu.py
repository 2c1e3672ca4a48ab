"""Runs on a GPU what the library is for: promises, training, examples and benchmarks.

`python -m tools.gpu` uses the frameworks of the Python that runs it, so that their GPU builds are
the ones a user has, and needs no network. It ends within ten minutes. What it finds goes to
build/gpu.json, its tables to tools/gpu.json, of which `python -m benchmarks.pages` writes the page;
what cannot run stands in both with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import multiprocessing.pool
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import machine, pages, tables
from simulated_cuda import device as simulated_cuda
from tools import ROOT

NEVER, AT_A_TIME = "never run on a GPU", 4
# Prints the name of the GPU that a framework sees, or nothing.
SEEN = {
    "torch": "import torch\nif torch.cuda.is_available(): print(torch.cuda.get_device_name())",
    "jax": (
        "import jax\nfor d in jax.devices():\n    if d.platform == 'gpu': print(d.device_kind)"
    ),
    "tensorflow": (
        "import tensorflow as tf\n"
        "for d in tf.config.list_physical_devices('GPU')[:1]:\n"
        "    print(tf.config.experimental.get_device_details(d).get('device_name', d.name))"
    ),
}
PROMISES = tuple(
    f"tests/conformance/test_{name}.py"
    for name in ("device", "promises", "what_rules_see", "random_programs", "arguments")
)
ON_EACH_GPU = tuple(f"tests/simulated_cuda/{name}" for name in simulated_cuda.ON_EACH_GPU)
BENCHMARKS, TIMES = "benchmarks", "tools.float16_models"


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that runs in a process of its own.

    Its framework has to see the GPU, and `packages` have to be installed besides; `arguments` are
    those of the interpreter: a program, or tests.
    """

    name: str
    framework: str
    arguments: tuple[str, ...]
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_tests(self) -> bool:
        """Whether pytest runs it."""
        return self.arguments[0].startswith("tests/")

    @property
    def is_benchmarks(self) -> bool:
        """Whether it measures, and writes the results to a file."""
        return self.arguments[:2] == ("-m", BENCHMARKS)

    @property
    def is_timed(self) -> bool:
        """Whether it measures times, and so runs alone."""
        return self.is_benchmarks or self.arguments[:2] == ("-m", TIMES)


OWN = tuple(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
# The page shows what they print.
WITH_A_TABLE = ("examples/torch/digits.py", "examples/torch/policy_gradient.py")
# What a test of tests/frameworks/torch/test_devices.py shows.
OF_TORCH = {
    "every way with single, foreach and fused optimizers; "
    "the drop-in bit for bit as PyTorch's scaler": (
        "each_way_ends_as_the_plain_optimizer_and_the_drop_in_as_pytorchs_scaler"
    ),
    "float16 autocast, bit for bit beside PyTorch's scaler": (
        "float16_training_is_that_of_pytorchs_scaler_bit_for_bit"
    ),
    "a state saved on the GPU continues on the CPU": ("state_of_one_device_goes_on_on_the_other"),
    "`torch.compile` with inductor": "a_compiled_forward_pass",
    "`diagnose` and `Monitor`": "a_diagnosis_and_a_monitor",
    "two ranks on one GPU, over gloo": "two_ranks_on_one_device",
}
OF_JAX = (
    *("docstrings", "from_jmp", "leaves", "loops", "monitor", "orders", "persistence"),
    *("diagnose", "explain", "skipping", "state_form", "unless_skipped", "wrong_calls"),
)
IN_JAX = {
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "equinox_model": "equinox",
    "haiku_model": "haiku",
}


def _parts() -> list[Part]:
    """Returns all parts; what needs the fewest packages comes first."""
    native = {"LOSSSCALE_TEST_KERAS": "none"}
    on_torch, on_jax = {"KERAS_BACKEND": "torch"}, {"KERAS_BACKEND": "jax"}
    torch = functools.partial(Part, framework="torch", environment=on_torch)
    of = "tests/frameworks/torch/test_{}.py".format
    parts = [
        torch(f"PyTorch: {shows}", arguments=(f"{of('devices')}::test_{name}",))
        for shows, name in OF_TORCH.items()
    ]
    parts += [
        torch("PyTorch: clipping", arguments=(of("clipping"),)),
        torch("PyTorch: guard and explain", arguments=(of("buffers"), of("explain"))),
        torch("PyTorch: float16 models", arguments=(of("master_weights"),)),
        Part("PyTorch: promises", "torch", PROMISES, (), on_torch | native),
        torch("PyTorch: replayed steps, streams and threads", arguments=ON_EACH_GPU),
        # They take the GPU by themselves.
        Part(
            "PyTorch: Accelerate, Lightning and Hugging Face's Trainer",
            "torch",
            (of("trainers"),),
            ("accelerate", "lightning", "transformers"),
            on_torch | native,
        ),
        Part("JAX with Optax: promises", "jax", PROMISES, ("optax",), on_jax | native),
        Part(
            "JAX with Optax: all its other tests but those of several devices and of CPUs",
            "jax",
            tuple(f"tests/frameworks/jax/test_{name}.py" for name in OF_JAX),
            ("optax", "flax", "equinox", "haiku", "orbax"),
            on_jax | native,
        ),
        torch("PyTorch: waits and launches", arguments=("-m", "tools.gpu_counts")),
        _measured("PyTorch: benchmarks", "torch", "torch_native", ()),
        Part("PyTorch: a float16 model beside autocast, timed", "torch", ("-m", TIMES)),
        _measured("JAX with Optax: benchmarks", "jax", "optax", ("optax",)),
    ]
    # The others there are recipes, which show the line for a GPU.
    for stem in ("digits", "plain", "policy_gradient"):
        name, demo = f"examples/torch/{stem}.py", stem == "digits"
        arguments = (name, "--output", "build/gpu-demo.png") if demo else (name,)
        packages = ("sklearn", "matplotlib") if demo else ()
        parts.append(Part(f"PyTorch: {name}", "torch", arguments, packages))
    for path in sorted((ROOT / "examples" / "jax").glob("*.py")):
        name = str(path.relative_to(ROOT))
        packages = ("optax", IN_JAX.get(path.stem, "optax"))
        parts.append(Part(f"JAX with Optax: {name}", "jax", (name,), packages))
    for backend, title in (("torch", "PyTorch"), ("jax", "JAX"), ("tensorflow", "TensorFlow")):
        row = functools.partial(Part, framework=backend, environment={"KERAS_BACKEND": backend})
        where = f"Keras 3 on {title}"
        # The rows of PyTorch and Optax have been there already.
        of_keras = (*PROMISES, "-k", "keras")
        parts.append(row(f"{where}: promises", arguments=of_keras, packages=("keras",)))
        for example in ("fit_mixed_float16", "diagnose_gradients"):
            arguments = (f"examples/{example}.py",)
            parts.append(row(f"{where}: {arguments[0]}", arguments=arguments, packages=("keras",)))
        if backend != "tensorflow":
            parts.append(_measured(f"{where}: benchmarks", backend, backend, ("keras",)))
    environment = {"KERAS_BACKEND": "tensorflow", "LOSSSCALE_TEST_KERAS": "tf_keras"}
    title = "Keras 2 (tf_keras): promises"
    return [*parts, Part(title, "tensorflow", PROMISES, ("tf_keras",), environment)]


def _measured(name: str, framework: str, backend: str, packages: tuple[str, ...]) -> Part:
    cases = ("alone", "whole") if backend in ("torch_native", "optax") else ("big", "small", "mlp")
    arguments = ("-m", BENCHMARKS, "--backend", backend, "--case", *cases, "--rounds", "15")
    return Part(name, framework, arguments, packages)


PARTS = _parts()


def gpus() -> dict[str, str]:
    """Returns the name of the GPU for each framework that sees one."""
    found = {}
    for framework, program in SEEN.items():
        if importlib.util.find_spec(framework) is None:
            continue
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if name := done.stdout.strip():
            found[framework] = name.splitlines()[-1]
    return found


def why_not(part: Part, seen: Mapping[str, str]) -> str:
    """Returns why a part cannot run here; an empty string if it can."""
    tools = ("pytest", "hypothesis") if part.is_tests else ()
    for package in (part.framework, *part.packages, *tools):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return "" if part.framework in seen else f"this build of {part.framework} sees no GPU"


def run(part: Part, device: str, seconds: float) -> dict[str, Any]:
    """Runs a part, on "cuda" or "cpu", for so many seconds; returns what came of it, JSON-ready."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lossscale-gpu-") as folder:
        measured = pathlib.Path(folder, "bench.json")
        command = [sys.executable, *part.arguments]
        if part.is_tests:
            # What another release of a framework warns of is no failure here.
            options = ["-q", "-W", "default", "-p", "no:cacheprovider"]
            is_long = device == "cuda" and len(part.arguments) > 1
            if is_long and importlib.util.find_spec("xdist") is not None:
                options += ["-n", "4"]
            command = [sys.executable, "-m", "pytest", *options, *part.arguments]
        if part.is_benchmarks:
            kind = "gpu" if device == "cuda" else "cpu"
            quick = [] if device == "cuda" else ["--quick"]
            command += ["--device", kind, "--output", str(measured), *quick]
        elif part.is_timed and device == "cpu":
            command += ["--device", "cpu", "--rounds", "2", "--small"]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={
                    "CUDA_VISIBLE_DEVICES": "0",
                    **os.environ,
                    "LOSSSCALE_TEST_DEVICE": device,
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (*OWN, os.environ.get("PYTHONPATH")))
                    ),
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    # Several processes share the memory of the GPU.
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                    "MPLBACKEND": "agg",
                    **part.environment,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "not finished", "why": f"stopped after {seconds:.0f} s"}
        found: dict[str, Any] = {"outcome": "failed" if done.returncode else "passed"}
        found["seconds"] = round(time.monotonic() - start, 1)
        if part.is_tests:
            found |= counted(done.stdout)
        if measured.exists():
            found["benchmarks"] = json.loads(measured.read_text())
        if part.arguments[:2] == ("-m", TIMES) or part.arguments[0] in WITH_A_TABLE:
            found["table"] = [line for line in done.stdout.splitlines() if line.startswith("|")]
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            found["why"] = lines[-1][:200] if lines else f"exit status {done.returncode}"
            found["output"] = done.stdout[-20_000:]
    return found


def counted(output: str) -> dict[str, Any]:
    """Returns what the last line of pytest says, and the names of what failed."""
    lines = output.strip().splitlines() or [""]
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|skipped)", lines[-1])}
    return {
        "tests_passed": counts.get("passed", 0),
        "tests_failed": re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", output, re.MULTILINE),
        "tests_skipped": counts.get("skipped", 0),
    }


def shown(results: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the tables of tools/gpu.json from what build/gpu.json has."""
    found = results["parts"]
    seen = ", ".join(f"{name} ({gpu})" for name, gpu in results["gpus"].items())
    versions = ", ".join(f"{n} {v}" for n, v in results["versions"].items())
    outcomes = [{"part": p.name, "outcome": _outcome(found.get(p.name))} for p in PARTS]
    rows = {"Run": [f"{results['date'][:10]} with {seen}; {versions}"], "Outcomes": outcomes}
    for part in PARTS:
        if printed := found.get(part.name, {}).get("table"):
            rows[part.name] = printed
        measured = found.get(part.name, {}).get("benchmarks")
        if measured and measured["rows"]:
            sections = tables.sections(measured).items()
            rows |= {f"{part.name}: {title}": lines for title, lines in sections}
    return rows


def _outcome(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return NEVER
    if found["outcome"] == "not run":
        return f"not run: {found['why']}"
    if "tests_passed" not in found:
        return ": ".join(filter(None, (found["outcome"], found.get("why"))))
    passed, failed, others = (found[f"tests_{kind}"] for kind in ("passed", "failed", "skipped"))
    if not passed and not failed:
        return "not run: it does not apply to this device"
    if failed:
        return f"failed: {len(failed)} of {passed + len(failed)} tests, such as {failed[0]}"
    return f"passed, {passed} tests" + (f"; {others} do not apply" if others else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; the status is 1 if one failed, and 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="parts whose names have this in them")
    parser.add_argument("--minutes", type=float, default=9.5, help="after so many nothing starts")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--tables", type=pathlib.Path, default=pages.ON_A_GPU)
    options = parser.parse_args(arguments)
    seen = gpus() if options.device == "cuda" else dict.fromkeys(SEEN, "the CPU")
    if not seen:
        there = [name for name in SEEN if importlib.util.find_spec(name) is not None]
        print(
            f"No GPU: {', '.join(there) or 'no framework'} found in {sys.executable}, and none "
            "sees one. Nothing was run, and no file was changed."
        )
        return 0
    start = time.monotonic()
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": seen,
        "versions": machine.versions(),
        "parts": {},
    }
    parts = [part for part in PARTS if options.only in part.name]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    number = itertools.count(1)
    lock = threading.Lock()

    def take(part: Part) -> None:
        left = 60 * options.minutes - (time.monotonic() - start)
        why = why_not(part, seen) or ("" if left > 0 else "no time was left")
        found = {"outcome": "not run", "why": why} if why else run(part, options.device, left)
        with lock:
            results["parts"][part.name] = found
            print(f"[{next(number)}/{len(parts)}] {part.name}: {_outcome(found)}", flush=True)
            # At once: a run that is cut off has shown something.
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            if options.device == "cuda" or options.tables != pages.ON_A_GPU:
                pages.write(options.tables, shown(results))

    with multiprocessing.pool.ThreadPool(AT_A_TIME) as pool:
        pool.map(take, [part for part in parts if not part.is_timed], chunksize=1)
    for part in parts:
        if part.is_timed:
            take(part)
    failed = [name for name, found in results["parts"].items() if found["outcome"] == "failed"]
    for name in failed:
        print(f"--- {name}\n{results['parts'][name]['output']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

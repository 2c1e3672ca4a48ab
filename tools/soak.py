"""Runs random programs by the thousand, long runs, and runs that are killed, on every wrapper.

`python -m tools.soak` takes some hours; `python -m tools.soak --programs 5 --steps 2000 torch`
less. It needs the test environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from run import JAX, ROOT, TENSORFLOW, TF_KERAS, TORCH

TESTS = "tests/conformance/test_random_programs.py"
FIXTURES = ("-p", "conftest", "-p", "conformance.conftest")
# What a framework has besides.
RANDOM = ("scaled_gradients", "beside_torch")
MORE = {"torch": [f"tests/frameworks/torch/test_{name}.py" for name in RANDOM]}
PROCESSES = {"tensorflow": TENSORFLOW, "tf_keras": TF_KERAS, "jax": JAX, "torch": TORCH}


def main() -> int:
    """Runs it in a process for each framework; the status is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(PROCESSES))
    parser.add_argument("--programs", type=int, default=100, help="random programs a wrapper")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of a long run")
    parser.add_argument("--kills", type=int, default=3, help="runs a wrapper that are killed")
    parser.add_argument("-k", default="", help="as of pytest")
    arguments = parser.parse_args()
    if unknown := set(arguments.frameworks) - set(PROCESSES):
        parser.error(f"there is no framework {', '.join(sorted(unknown))}")
    further = {
        "LOSSSCALE_SOAK_PROGRAMS": str(arguments.programs),
        "LOSSSCALE_SOAK_STEPS": str(arguments.steps),
        "LOSSSCALE_SOAK_KILLS": str(arguments.kills),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests"))),
    }
    failed = []
    for name in arguments.frameworks or PROCESSES:
        print(f"{name}:", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider"]
        command += ["-k", arguments.k]
        environment = {**os.environ, **PROCESSES[name], **further}
        for files in ([TESTS, *MORE.get(name, ())], [*FIXTURES, "tools/soak_runs.py"]):
            if subprocess.run(
                [*command, *files], cwd=ROOT, env=environment, check=False
            ).returncode:
                failed.append(name)
    print(f"failed: {', '.join(dict.fromkeys(failed))}" if failed else "passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Runs the promises on the oldest and on the newest releases that the extras admit.

`python -m tools.versions` makes two environments for each set in a temporary folder, which takes
some minutes and, for PyTorch, gigabytes, from a package index; `python -m tools.versions jax
tensorflow` makes these, and `jax --releases newest` one of them. The newest are those for the
Python that runs this, which needs no packages. docs/api/what_runs_where.md has the table.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
import venv

from run import JAX, ROOT, TENSORFLOW, TF_KERAS, TORCH

TOOLS = ("pytest", "hypothesis", "h5py")
PROMISES = "tests/conformance/test_promises.py"
# On the newest releases: in older ones fallbacks serve.
PRIVATE_NAMES = "tests/core/test_private_names.py"

# What is installed together: the extras of this project whose lowest releases these are, and what
# else is as old as they need it.
SETS = {
    "jax": (("keras", "jax", "optax"), ("jaxlib==0.6.0", "numpy==1.26.4", "ml_dtypes==0.5.0")),
    "torch": (("keras", "torch"), ("ml_dtypes==0.4.0",)),
    "tensorflow": (("tensorflow",), ()),
    "tf_keras": (("tf-keras",), ()),
}
ENVIRONMENTS = {"jax": JAX, "torch": TORCH, "tensorflow": TENSORFLOW, "tf_keras": TF_KERAS}
RELEASES = ("oldest", "newest")
# Keras 3.9 does not touch the optimizer that its own class is put around, which ours refuses then.
UNTOUCHED = f"{PROMISES}::test_a_framework_does_not_put_its_own_class_around_ours[keras"
# Tests of what the oldest releases of a set cannot do themselves.
IMPOSSIBLE = {
    "jax": [UNTOUCHED],
    "tensorflow": [UNTOUCHED],
    # A gradient of another dtype than its parameter's.
    "torch": [
        UNTOUCHED,
        *(
            f"{PROMISES}::{test}[torch-native-{mode}]"
            for test in (
                "test_a_non_finite_value_is_found_in_a_gradient_of_another_dtype",
                "test_small_float16_gradients_survive_a_large_scale",
            )
            for mode in ("host", "device")
        ),
    ],
    # The last bit of momentum under XLA: of m * v - g * r LLVM fuses either product with the
    # difference, and not always the same one. Unoptimized, with
    # XLA_FLAGS=--xla_backend_optimization_level=0, these tests pass.
    "tf_keras": [
        f"{PROMISES}::{test}"
        for test in (
            "test_training_with_skipped_steps_is_training_without_them[tf_keras-new-xla-momentum]",
        )
    ],
}


def admitted(extras: tuple[str, ...]) -> list[str]:
    """Returns what extras ask for, as `name>=version,<version`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted({line for extra in extras for line in project["optional-dependencies"][extra]})


def lowest(extras: tuple[str, ...]) -> list[str]:
    """Returns the lowest releases that extras admit, as `name==version`."""
    return [line.partition(",")[0].replace(">=", "==") for line in admitted(extras)]


def install(name: str, releases: str, folder: pathlib.Path) -> pathlib.Path:
    """Makes the environment of a set, and returns its interpreter."""
    extras, pins = SETS[name]
    place = folder / f"{name}-{releases}"
    python = place / "bin" / "python"
    venv.create(place, with_pip=True)
    wanted = [*lowest(extras), *pins] if releases == "oldest" else admitted(extras)
    packages = [*wanted, *TOOLS]
    print(f"{name}, {releases}: installing {' '.join(packages)}", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    return python


def run(name: str, releases: str, python: pathlib.Path, further: list[str]) -> int:
    """Runs the tests of a set, and returns the exit status."""
    tests = [PROMISES, *([PRIVATE_NAMES] if releases == "newest" else [])]
    impossible = IMPOSSIBLE.get(name, []) if releases == "oldest" else []
    left_out = [f"--deselect={test}" for test in impossible]
    options = ["-q", "-p", "no:cacheprovider", *left_out, *further]
    command = [str(python), "-m", "pytest", *tests, *options]
    print(f"{name}, {releases}: {' '.join(command[1:])}", flush=True)
    environment = {**os.environ, **ENVIRONMENTS[name], "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Runs the sets that are named, all by default; the status is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--releases", choices=RELEASES, help="only these")
    parser.add_argument("--python", type=pathlib.Path, help="an environment made before, for one")
    parser.add_argument("-k", default="", help="as of pytest")
    arguments = parser.parse_args()
    names = arguments.sets or list(SETS)
    if unknown := set(names) - set(SETS):
        parser.error(f"there is no set {', '.join(sorted(unknown))}")
    which = [arguments.releases] if arguments.releases else RELEASES
    environments = [(name, releases) for name in names for releases in which]
    further = ["-k", arguments.k] if arguments.k else []
    with tempfile.TemporaryDirectory(prefix="lossscale-versions-") as folder:
        failed = []
        for name, releases in environments:
            python = arguments.python or install(name, releases, pathlib.Path(folder))
            if run(name, releases, python, further):
                failed.append(f"{name}, {releases}")
    passed = [f"{name}, {releases}" for name, releases in environments]
    print(f"failed: {'; '.join(failed)}" if failed else f"passed: {'; '.join(passed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

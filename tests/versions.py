"""Runs the promises on the oldest releases that the extras admit.

`make versions` makes an environment for each set in a temporary folder, which takes some minutes
and, for PyTorch, gigabytes; `make versions SETS="jax tensorflow"` makes these. The newest releases
are those of `constraints.txt`, which `make test` runs with. docs/what_runs_where.md has the table.
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

ROOT = pathlib.Path(__file__).parents[1]
TOOLS = ("pytest", "hypothesis", "h5py", "matplotlib", "rich")
PROMISES = "tests/conformance/test_promises.py"


# What is installed together: the extras of this project whose lowest releases these are, and what
# else is as old as they need it; then the folders of tests/frameworks whose private names are
# looked for.
SETS = {
    "jax": (
        ("keras", "jax", "optax"),
        ("jaxlib==0.6.0", "numpy==1.26.4", "ml_dtypes==0.5.0"),
        ("keras", "jax"),
    ),
    "torch": (("keras", "torch"), ("numpy==1.26.4", "ml_dtypes==0.4.0"), ("keras", "torch")),
    "tensorflow": (("tensorflow",), (), ("keras",)),
    "tf_keras": (("tf_keras",), (), ("tf_keras",)),
}
ENVIRONMENTS = {
    **{name: {"KERAS_BACKEND": name} for name in SETS},
    "tf_keras": {"KERAS_BACKEND": "tensorflow", "LOSSSCALE_TEST_KERAS": "tf_keras"},
}
# Tests of what the releases of a set cannot do themselves.
IMPOSSIBLE = {
    # A gradient of another dtype than its parameter's.
    "torch": [
        f"{PROMISES}::{test}[torch-native-{mode}]"
        for test in (
            "test_a_non_finite_value_is_found_in_a_gradient_of_another_dtype",
            "test_small_float16_gradients_survive_a_large_scale",
        )
        for mode in ("host", "device")
    ],
}


def lowest(extras: tuple[str, ...]) -> list[str]:
    """Returns the lowest releases that extras admit, as `name==version`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return sorted({line.partition(",")[0].replace(">=", "==") for line in wanted})


def install(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Makes the environment of a set, and returns its interpreter."""
    extras, pins, _ = SETS[name]
    python = folder / name / "bin" / "python"
    venv.create(folder / name, with_pip=True)
    packages = [*lowest(extras), *pins, *TOOLS]
    print(f"{name}: installing {' '.join(packages)}", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    return python


def run(name: str, python: pathlib.Path, further: list[str]) -> int:
    """Runs the tests of a set, and returns the exit status."""
    *_, rooms = SETS[name]
    tests = [PROMISES, *(f"tests/frameworks/{room}/test_private_names.py" for room in rooms)]
    left_out = [f"--deselect={test}" for test in IMPOSSIBLE.get(name, [])]
    options = ["-q", "-p", "no:cacheprovider", *left_out, *further]
    command = [str(python), "-m", "pytest", *tests, *options]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    environment = {**os.environ, **ENVIRONMENTS[name], "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Runs the sets that are named, all by default; the status is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--python", type=pathlib.Path, help="an environment made before, for one")
    parser.add_argument("-k", default="", help="as of pytest")
    arguments = parser.parse_args()
    names = arguments.sets or list(SETS)
    if unknown := set(names) - set(SETS):
        parser.error(f"there is no set {', '.join(sorted(unknown))}")
    further = ["-k", arguments.k] if arguments.k else []
    with tempfile.TemporaryDirectory(prefix="lossscale-versions-") as folder:
        failed = [
            name
            for name in names
            if run(name, arguments.python or install(name, pathlib.Path(folder)), further)
        ]
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(names)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Runs the promises on the oldest releases that the extras admit.

`make versions` makes an environment for each set in a temporary folder, which takes some minutes
and, for PyTorch, gigabytes; `make versions SETS="jax tensorflow"` makes these. The newest releases
are those of `constraints.txt`, which `make test` runs with. docs/what_runs_where.md has the table.
"""

from __future__ import annotations

import argparse
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Set:
    """Releases that are installed together.

    Attributes:
        extras: The extras of this project whose lowest releases these are.
        pins: What else is as old as they need it.
        environment: What selects the backend.
        tests: What pytest runs.
    """

    extras: tuple[str, ...]
    pins: tuple[str, ...]
    environment: dict[str, str]
    tests: tuple[str, ...]


SETS = {
    "jax": Set(
        ("keras", "jax"),
        ("jaxlib==0.4.30", "numpy==1.26.4", "ml_dtypes==0.4.0"),
        {"KERAS_BACKEND": "jax"},
        (PROMISES, "tests/frameworks/keras/test_private_names.py"),
    ),
    "torch": Set(
        ("keras", "torch"),
        ("numpy==1.26.4", "ml_dtypes==0.4.0"),
        {"KERAS_BACKEND": "torch"},
        (PROMISES, "tests/frameworks/keras/test_private_names.py"),
    ),
    "tensorflow": Set(
        ("tensorflow",),
        (),
        {"KERAS_BACKEND": "tensorflow"},
        (PROMISES, "tests/frameworks/keras/test_private_names.py"),
    ),
    "tf_keras": Set(
        ("tf_keras",),
        (),
        {"KERAS_BACKEND": "tensorflow", "LOSSSCALE_TEST_KERAS": "tf_keras"},
        (PROMISES, "tests/frameworks/tf_keras/test_private_names.py"),
    ),
}


def lowest(extras: tuple[str, ...]) -> list[str]:
    """Returns the lowest releases that extras admit, as `name==version`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return sorted({line.partition(",")[0].replace(">=", "==") for line in wanted})


def install(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Makes the environment of a set, and returns its interpreter."""
    found = SETS[name]
    python = folder / name / "bin" / "python"
    venv.create(folder / name, with_pip=True)
    packages = [*lowest(found.extras), *found.pins, *TOOLS]
    print(f"{name}: installing {' '.join(packages)}", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    return python


def run(name: str, python: pathlib.Path, further: list[str]) -> int:
    """Runs the tests of a set, and returns the exit status."""
    found = SETS[name]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *found.tests, *further]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    environment = {**os.environ, **found.environment, "PYTHONPATH": str(ROOT / "src")}
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

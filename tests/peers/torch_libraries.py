"""Runs the suites of Accelerate and Lightning with `GradScaler` in the places of PyTorch's.

Each suite runs twice: as it is, and with ours. What passes as it is must pass with ours. The suite
of Accelerate comes from the package index. That of Lightning is not published there; it is run from
a checkout of its repository at the tag of the version that is installed, or of one near it:

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    make peers LIGHTNING=pytorch-lightning
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite of somebody else.

    Attributes:
        name: For the reader.
        folder: Where it runs.
        files: What pytest runs there.
        options: Of pytest.
    """

    name: str
    folder: pathlib.Path
    files: tuple[str, ...]
    options: tuple[str, ...] = ()


ACCELERATE = ("tests/test_optimizer.py", "tests/test_scheduler.py", "tests/test_kwargs_handlers.py")
LIGHTNING = (
    "tests_fabric/plugins/precision/test_amp.py",
    "tests_pytorch/plugins/precision/test_amp.py",
    "tests_pytorch/plugins/test_amp_plugins.py",
    "tests_pytorch/trainer/optimization/test_manual_optimization.py",
)


def accelerate(folder: pathlib.Path) -> Suite:
    """Returns the suite of the Accelerate that is installed; its source distribution has it."""
    version = importlib.metadata.version("accelerate")
    unpacked = folder / f"accelerate-{version}"
    if not unpacked.exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", ":all:", "--dest", str(folder), f"accelerate=={version}"),
            ],
            check=True,
        )
        (archive,) = folder.glob(f"accelerate-{version}.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    # It brings no settings for pytest, and those of this project are not meant for it.
    options = ("--rootdir", str(unpacked), "-c", os.devnull)
    return Suite(f"Accelerate {version}", unpacked, ACCELERATE, options)


def outcomes(suite: Suite, scaler: str) -> dict[str, str]:
    """Runs a suite; returns what became of each test, by its name."""
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests/peers/substituted.py"), scaler),
            *("-v", "--color=no", "-p", "no:cacheprovider", *suite.options, *suite.files),
        ],
        cwd=suite.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(suite.folder)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = re.findall(
        r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", done.stdout, re.MULTILINE
    )
    if not found:
        print(done.stdout)
    return dict(found)


def report(suite: Suite) -> bool:
    """Runs a suite both ways and prints what came of it; returns whether ours does as well."""
    plain, ours = outcomes(suite, "torch"), outcomes(suite, "lossscale")
    for name, found in (("as it is", plain), ("with lossscale.torch.GradScaler", ours)):
        counts = [
            f"{list(found.values()).count(kind)} {kind.lower()}"
            for kind in dict.fromkeys(found.values())
        ]
        print(f"{suite.name}, {name}: {', '.join(counts) or 'nothing ran'}", flush=True)
    worse = [test for test, outcome in plain.items() if ours.get(test) != outcome]
    for test in worse:
        print(f"    {plain[test]} as it is, {ours.get(test)} with ours: {test}")
    return bool(plain) and "PASSED" in plain.values() and not worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where to put what is downloaded")
    parser.add_argument("--lightning", default="", help="a checkout of Lightning's repository")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    good = report(accelerate(folder))
    if not arguments.lightning:
        print(
            "Lightning: not run; its tests are in its repository only:"
            + __doc__.partition("it:")[2]
        )
        return 0 if good else 1
    tests = pathlib.Path(arguments.lightning).resolve() / "tests"
    version = importlib.metadata.version("lightning")
    return 0 if report(Suite(f"Lightning {version}", tests, LIGHTNING)) and good else 1


if __name__ == "__main__":
    sys.exit(main())

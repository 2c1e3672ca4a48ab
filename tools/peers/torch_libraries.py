"""Runs the suites of Accelerate and Lightning with `GradScaler` in the places of PyTorch's.

Each suite runs twice: as it is, and with ours. What passes as it is must pass with ours. The suite
of Accelerate comes from the package index. That of Lightning is not published there; it is run from
a checkout of its repository at the tag of the version that is installed, or of one near it:

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python -m tools.peers.torch_libraries build/peers --lightning pytorch-lightning

It takes some minutes, and needs the test environment and a package index.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tarfile

from tools import ROOT

ACCELERATE = ("tests/test_optimizer.py", "tests/test_scheduler.py", "tests/test_kwargs_handlers.py")
LIGHTNING = (
    "tests_fabric/plugins/precision/test_amp.py",
    "tests_pytorch/plugins/precision/test_amp.py",
    "tests_pytorch/plugins/test_amp_plugins.py",
    "tests_pytorch/trainer/optimization/test_manual_optimization.py",
)


# Runs pytest; what is imported from a module stays what it was, so ours come first.
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
WITH_OURS = f"import lossscale.torch; lossscale.torch.install(); {PYTEST}"


def unpacked_accelerate(version: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns where the source distribution of Accelerate is, which has its tests."""
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
    return unpacked


def outcomes(program: str, folder: pathlib.Path, arguments: tuple[str, ...]) -> dict[str, str]:
    """Runs tests in a folder; returns what became of each, by its name."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "-v", "--color=no", "-p", "no:cacheprovider"),
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])},
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


def report(package: str, folder: pathlib.Path, *arguments: str) -> bool:
    """Runs a suite both ways and prints what came of it; returns whether ours does as well."""
    name = f"{package} {importlib.metadata.version(package)}"
    plain, ours = (outcomes(program, folder, arguments) for program in (PYTEST, WITH_OURS))
    for way, found in (("as it is", plain), ("with lossscale.torch.GradScaler", ours)):
        counts = [f"{n} {kind.lower()}" for kind, n in collections.Counter(found.values()).items()]
        print(f"{name}, {way}: {', '.join(counts) or 'nothing ran'}", flush=True)
    worse = [test for test, outcome in plain.items() if ours.get(test) != outcome]
    for test in worse:
        print(f"    {plain[test]} as it is, {ours.get(test)} with ours: {test}")
    return "PASSED" in plain.values() and not worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where to put what is downloaded")
    parser.add_argument("--lightning", default="", help="a checkout of Lightning's repository")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    accelerate = unpacked_accelerate(importlib.metadata.version("accelerate"), folder)
    # It brings no settings for pytest, and those of this project are not meant for it.
    good = report(
        "accelerate", accelerate, "--rootdir", str(accelerate), "-c", os.devnull, *ACCELERATE
    )
    if arguments.lightning:
        tests = pathlib.Path(arguments.lightning).resolve() / "tests"
        good = report("lightning", tests, *LIGHTNING) and good
    else:
        print("lightning: not run; its tests are in its repository only (--lightning)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

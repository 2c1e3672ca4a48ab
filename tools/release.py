"""Tries what is published: builds it, and installs it as a stranger does.

`python -m tools.release` builds the wheels of both distributions and the source distribution,
checks their metadata, and makes an environment for each extra, outside of the checkout: with the
oldest pip that PACKAGE.md admits and with the newest, on each Python that is there. In each runs
the first example of that extra, and every public name of its front;
lossscale-migration is installed beside Keras. The tests of the source distribution run from it, in
the test environment. It takes about an hour and a package index; `python -m tools.release --extras
torch optax` less.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

from tools import ROOT

OLDEST_PIP = "23.0.1"
# For each extra the first example, the backend of Keras in it, and the modules that must be whole.
ALONE = ("lossscale", "lossscale.rules", "lossscale.errors")
KERAS = (*ALONE, "lossscale.callbacks", "lossscale.diagnosis")
EXTRAS = {
    "none": ("none", "", ALONE),
    "tensorflow": ("docs/keras.md", "tensorflow", (*KERAS, "lossscale.experimental")),
    "keras,jax": ("docs/keras.md", "jax", KERAS),
    "keras,torch": ("docs/keras.md", "torch", KERAS),
    "tf-keras": ("tf_keras", "tensorflow", (*KERAS, "lossscale.experimental")),
    "torch": ("README.md", "", (*ALONE, "lossscale.torch")),
    "optax": ("docs/jax.md", "", (*ALONE, "lossscale.optax")),
    "diagnosis": ("none", "", (*ALONE, "lossscale.monitoring")),
    "migration": ("docs/old_files.md", "tensorflow", (*KERAS, "lossscale_migration")),
}
PROGRAMS = {
    "none": "import lossscale\nprint(lossscale.DynamicScale().init())",
    "tf_keras": (
        "import tensorflow as tf\nimport tf_keras\nimport lossscale\n"
        "opt = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD(0.25))\n"
        "weight = tf.Variable(1.0)\nopt.minimize(lambda: weight**2, [weight])\n"
        "assert float(weight) == 0.5, float(weight)\n"
    ),
}
NAMES = (
    "import importlib, sys\n"
    "for module in sys.argv[1:]:\n"
    "    found = importlib.import_module(module)\n"
    "    for name in found.__all__:\n"
    "        getattr(found, name)\n"
)


class FailedError(Exception):
    """A step did not do what a stranger would expect."""


def run(command: list[object], folder: pathlib.Path, **environment: str) -> str:
    """Runs a command outside of the checkout; returns what it printed."""
    kept = ("PATH", "HOME", "LANG", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE")
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={
            **{name: os.environ[name] for name in kept if name in os.environ},
            "MPLBACKEND": "agg",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise FailedError(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def program_of(source: str) -> str:
    """Returns the first Python program of a page, or the one of that name."""
    if source in PROGRAMS:
        return PROGRAMS[source]
    page = (ROOT / source).read_text(encoding="utf-8")
    return re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]


def built(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """Builds two wheels and the source distribution, and checks what their pages will say.

    Returns:
        The wheel of lossscale, that of lossscale-migration, and the source distribution.
    """
    tools, packages = folder / "tools", folder / "dist"
    run([sys.executable, "-m", "venv", tools], folder)
    run([tools / "bin" / "pip", "install", "-q", "build", "twine"], folder)
    # From a copy, so that nothing that lies in the checkout decides what is in it.
    copy = folder / "checkout"
    run(["git", "clone", "-q", ROOT, copy], folder)
    build = [tools / "bin" / "python", "-m", "build", "--outdir", packages]
    run([*build, copy], folder)
    run([*build, "--wheel", copy / "lossscale-migration"], folder)
    print(run([tools / "bin" / "twine", "check", "--strict", *packages.iterdir()], folder).strip())
    patterns = ("lossscale-*.whl", "lossscale_migration-*.whl", "*.tar.gz")
    wheel, migration, sources = (next(packages.glob(pattern)) for pattern in patterns)
    return wheel, migration, sources


def check_sources(sources: pathlib.Path, folder: pathlib.Path) -> None:
    """Checks that the source distribution is whole: its tests run from it."""
    with tarfile.open(sources) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sources.name.removesuffix(".tar.gz")
    folders = ("tests", "docs", "examples", "benchmarks", "tools", "lossscale-migration")
    kept = run(["git", "ls-files", *folders], folder / "checkout").split()
    missing = [path for path in kept if not (unpacked / path).exists()]
    if missing:
        raise FailedError(f"the source distribution lacks {', '.join(missing)}")
    for name in ("CHANGELOG.md", "constraints.txt", "Makefile", "mkdocs.yml", "SECURITY.md"):
        if not (unpacked / name).exists():
            raise FailedError(f"the source distribution lacks {name}")
    tests = ROOT / ".venv-test" / "bin" / "python"
    command = [tests, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core/test_rules.py"]
    command += ["tests/conformance/test_promises.py", "tests/docs"]
    said = run(command, unpacked, PYTHONPATH=str(unpacked / "src"), KERAS_BACKEND="torch")
    print(f"source distribution: {said.strip().splitlines()[-1]}")


def check_extra(
    python: str, pip: str, extra: str, wheels: tuple[pathlib.Path, ...], folder: pathlib.Path
) -> None:
    """Installs an extra into a bare environment and uses it."""
    wheel, migration = wheels
    place = folder / "environment"
    shutil.rmtree(place, ignore_errors=True)
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    run([python, "-m", "venv", place], folder)
    inside = place / "bin" / "python"
    wanted = f"pip=={pip}" if pip != "newest" else "pip"
    run([inside, "-m", "pip", "install", "-q", "--upgrade", wanted], folder)
    required = [str(wheel) if extra == "none" else f"{wheel}[{extra}]"]
    if extra == "migration":
        required = [f"{wheel}[tensorflow]", str(migration)]
    constraints = ["-c", ROOT / "constraints.txt"]
    run([inside, "-m", "pip", "install", "-q", *constraints, *required], folder)
    source, backend, modules = EXTRAS[extra]
    environment = {"KERAS_BACKEND": backend} if backend else {}
    if extra == "tf-keras":
        environment["TF_USE_LEGACY_KERAS"] = "1"
    run([inside, "-c", program_of(source)], work, **environment)
    run([inside, "-c", NAMES, *modules], work, **environment)


def pythons() -> list[str]:
    """Returns an interpreter of each minor release that there is, this one first."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    for minor in (11, 12, 13):
        candidates = [
            shutil.which(f"python3.{minor}"),
            *sorted(pathlib.Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")),
        ]
        for candidate in filter(None, candidates):
            command = [str(candidate), "-c", "import sys, venv; print(sys.version_info.minor)"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.stdout.strip() == str(minor):
                found.setdefault(f"3.{minor}", str(candidate))
    return list(found.values())


def main() -> int:
    """Runs all of it; the status is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", nargs="+", choices=EXTRAS, metavar="EXTRA", help="or none")
    parser.add_argument("--pips", nargs="+", default=[OLDEST_PIP, "newest"], metavar="VERSION")
    parser.add_argument("--pythons", nargs="+", metavar="PATH", help="all that are found")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="lossscale-release-") as name:
        folder = pathlib.Path(name)
        *wheels, sources = built(folder)
        if options.extras is None:
            check_sources(sources, folder)
        for python in options.pythons or pythons():
            version = subprocess.run(
                [python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for pip in options.pips:
                if pip == OLDEST_PIP and not version.startswith("3.11"):
                    # That pip does not start on a later Python.
                    continue
                for extra in options.extras or EXTRAS:
                    start = time.monotonic()
                    what = f"Python {version}, pip {pip}, [{extra}]"
                    try:
                        check_extra(python, pip, extra, tuple(wheels), folder)
                    except FailedError as error:
                        failed.append(what)
                        print(f"{what}: FAILED\n{error}", flush=True)
                    else:
                        print(f"{what}: passed, {time.monotonic() - start:.0f} s", flush=True)
    print(f"failed: {'; '.join(failed)}" if failed else "passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""What is installed, read from metadata: nothing that is asked about is imported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lossscale import registry
from lossscale.packages import BACKENDS, install_command

PACKAGES = (
    "numpy",
    "ml_dtypes",
    *(framework.root for framework in registry.frameworks()),
    "optax",
    "matplotlib",
    "rich",
)
_MAJOR_VERSIONS = {
    framework.root: framework.major_version.rstrip(".")
    for framework in registry.frameworks()
    if framework.major_version
}
_KERAS, _TF_KERAS = registry.kerases()


class Stack(NamedTuple):
    """A framework, and the one it computes with, that loss scaling runs on.

    Attributes:
        name: What it is called.
        packages: The packages it needs.
        extras: The extras of lossscale that install them.
    """

    name: str
    packages: tuple[str, ...]
    extras: tuple[str, ...]


STACKS = (
    *(
        Stack(
            f"{_KERAS.title} on {registry.named(backend).title}",
            (_KERAS.root, backend),
            (_KERAS.root, backend),
        )
        for backend in BACKENDS
    ),
    Stack(f"Keras 2 ({_TF_KERAS.title})", (_TF_KERAS.root, "tensorflow"), ("tf-keras",)),
    Stack(f"{registry.named('torch').title}, without Keras", ("torch",), ("torch",)),
    Stack(f"{registry.named('jax').title} with Optax", ("optax", "jax"), ("optax",)),
)


def installed_versions() -> dict[str, str | None]:
    """Returns the version of each of `PACKAGES`, None for those that are not installed.

    A package that is there without its metadata has the version "unknown".
    """
    distributions = metadata.packages_distributions()
    versions = {}
    for package in PACKAGES:
        try:
            found = find_spec(package) is not None
        except ValueError:
            # What has no spec was put into sys.modules by hand.
            found = False
        versions[package] = _version(distributions.get(package, [])) if found else None
    return versions


def _version(distributions: list[str]) -> str:
    # A distribution goes by other names too, such as tensorflow-cpu for tensorflow.
    for name in distributions:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if found:
            return found
    return "unknown"


def why_not(stack: Stack, versions: dict[str, str | None]) -> str | None:
    """Returns why loss scaling does not run on a framework, None if it should.

    Args:
        stack: The framework and what it computes with.
        versions: What `installed_versions` returns.
    """
    command = install_command(stack.extras)
    lowest = _lowest_versions()
    for package in stack.packages:
        version = versions[package]
        if version is None:
            return f"{package} is not installed: {command}"
        needed = lowest.get(package, "0")
        if version != "unknown" and _numbers(version) < _numbers(needed):
            return f"{package} {version} is too old, it needs {needed} or later: {command}"
        major = _MAJOR_VERSIONS.get(package)
        if major is not None and version != "unknown" and version.partition(".")[0] != major:
            return f"{package} {version} is not supported, only {package} {major}: {command}"
    return None


def _lowest_versions() -> dict[str, str]:
    pattern = re.compile(r"([\w.-]+)[^;]*?>=([\d.]+)")
    found = (pattern.match(line) for line in metadata.requires("lossscale") or ())
    return {match[1]: match[2] for match in found if match}


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def keras_backend() -> tuple[str, str]:
    """Returns what Keras 3 will compute with, and where that is set."""
    named = os.environ.get("KERAS_BACKEND")
    if named:
        return named, "KERAS_BACKEND"
    folder = os.environ.get("KERAS_HOME") or str(Path.home() / ".keras")
    path = Path(folder) / "keras.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        # Keras ignores a file that it cannot read, too.
        return "tensorflow", "the default"
    return str(named), str(path)


def gpus() -> list[str] | None:
    """Returns the names of the GPUs that `nvidia-smi` lists, None if there is no such command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]

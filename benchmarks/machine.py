"""The machine of the measurements, its memory, and the memory that a program used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Callable
from typing import Any

_PACKAGES = ("keras", "tensorflow", "tf_keras", "jax", "jaxlib", "torch", "optax")
_CPUS = pathlib.Path("/proc/cpuinfo")
_STATUS = pathlib.Path("/proc/self/status")


def describe() -> dict[str, Any]:
    """Returns the machine and the interpreter, JSON-ready."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    # platform.processor() is empty or the architecture's name on Linux.
    found = re.search(r"^model name\s*:\s*(.+)$", _CPUS.read_text() if _CPUS.exists() else "", re.M)
    return {
        "processor": found[1].strip() if found else platform.processor() or platform.machine(),
        "cores": len(cores),
        "memory_bytes": memory,
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of the frameworks that are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def peak_above_rest(run: Callable[[], None]) -> int | None:
    """Runs a function and returns the growth of resident memory meanwhile, in bytes.

    Whole pages are counted. Memory that the allocator had kept is not counted, so it is returned to
    the system first.

    Returns:
        The growth; None on systems other than Linux with the GNU C library.
    """
    try:
        trim = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    gc.collect()
    trim(0)
    try:
        # Resets the peak.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        rest = _kibibytes(_STATUS, "VmRSS")
    except OSError:
        return None
    run()
    return max(0, _kibibytes(_STATUS, "VmHWM") - rest) * 1024


def _kibibytes(file: pathlib.Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.M)
    if found is None:
        raise OSError(f"{file} has no {field}")
    return int(found[1])

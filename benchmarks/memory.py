"""How much memory there is, and the peak of what is resident while something runs."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
from collections.abc import Callable

_MEMINFO = pathlib.Path("/proc/meminfo")
_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_above_rest(run: Callable[[], None]) -> int | None:
    """Runs something and returns how far resident memory rose meanwhile, in bytes.

    Whole pages are counted, and memory that the allocator had kept is not; so it is given back to
    the system first.

    Returns:
        None where the system does not tell, that is elsewhere than on Linux with the GNU C library.
    """
    try:
        trim = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    gc.collect()
    trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        rest = _kibibytes(_STATUS, "VmRSS")
    except OSError:
        return None
    run()
    return max(0, _kibibytes(_STATUS, "VmHWM") - rest) * 1024


def available() -> int | None:
    """Returns how much memory can be had, in bytes; None where the system does not tell.

    What this process holds counts too: allocators keep what they will give out again.
    """
    try:
        return (_kibibytes(_MEMINFO, "MemAvailable") + _kibibytes(_STATUS, "VmRSS")) * 1024
    except OSError:
        return None


def _kibibytes(file: pathlib.Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.M)
    if found is None:
        raise OSError(f"{file} has no {field}")
    return int(found[1])

"""Reads everything in a model file; the exit status reports the result.

It runs as a program, by its path, because a damaged file can crash the process inside the HDF5
library. It imports nothing from this package, so that the interpreter starts quickly.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from typing import Any

READ = 0
DAMAGED = 3
NOT_INSTALLED = 4

# Deflate expands a byte to at most about a thousand.
_LARGEST_RATIO = 1100
_ANY_FILE = 2**20


# The allowed expansion of the members of a zip file: Keras and NumPy store arrays uncompressed, and
# trained weights do not compress a hundredfold.
_LARGEST_ZIP_RATIO = 100
_ANY_ZIP = 2**28
_LARGEST_TEXT = 2**25


def check_size(path: str | os.PathLike[str]) -> None:
    """Raises if the content of a zip file would need far more memory than the size of the file.

    Args:
        path: The zip file.

    Raises:
        ValueError: If it would, or a text in it is larger than in any model.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    held = sum(member.compress_size for member in members)
    expanded = sum(member.file_size for member in members)
    # Several members may claim the same bytes.
    held = min(held, os.path.getsize(path))
    if expanded > _ANY_ZIP + _LARGEST_ZIP_RATIO * held:
        raise ValueError(
            f"{held} bytes of it expand to {expanded}, more than {_LARGEST_ZIP_RATIO} times as "
            "many; if the file is what it should be, save it without compression"
        )
    for member in members:
        if member.filename.endswith(".json") and member.file_size > _LARGEST_TEXT:
            raise ValueError(
                f"{member.filename} has {member.file_size} bytes, and no model needs more than "
                f"{_LARGEST_TEXT}"
            )


def read_everything(path: str) -> None:
    """Reads every attribute and array of an HDF5 file, or of the HDF5 file inside a `.keras` file.

    Args:
        path: The file.

    Raises:
        Exception: Whatever h5py and zipfile raise.
        ValueError: If an array is larger than the file can hold.
    """
    import h5py

    if zipfile.is_zipfile(path):
        check_size(path)
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".h5"):
                    content = archive.read(name)
                    with h5py.File(io.BytesIO(content), "r") as file:
                        read_group(file, len(content))
        return
    with h5py.File(path, "r") as file:
        read_group(file, os.path.getsize(path))


def read_group(file: Any, size: int) -> None:
    """Reads every attribute and array below a group of an HDF5 file of this size.

    Raises:
        ValueError: If an array is larger than the file can hold.
    """
    import h5py

    def read(name: str, item: Any) -> None:
        for key in item.attrs:
            item.attrs[key]
        if isinstance(item, h5py.Dataset):
            if item.nbytes > _LARGEST_RATIO * size + _ANY_FILE:
                raise ValueError(f"{name} is an array of {item.nbytes} bytes")
            item[()]

    read("/", file)
    file.visititems(read)


def _limit(seconds: int) -> None:
    """Limits the CPU time of the process, and prevents a core file."""
    try:
        import resource
        import signal
    except ImportError:  # Windows has no such module.
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    # A Python signal handler would wait for the library to return.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def _main(path: str, seconds: int) -> int:
    _limit(seconds)
    try:
        import h5py  # noqa: F401
    except ImportError:
        return NOT_INSTALLED
    try:
        read_everything(path)
    # A damaged file can raise any exception in these libraries.
    except Exception as error:
        print((str(error).strip().splitlines() or [type(error).__name__])[0][:300])
        return DAMAGED
    return READ


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2])))

"""Damaged files: one error for every exception that they cause, and a check in a new process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import lossscale_migration.hdf5_reader as hdf5_reader
from lossscale.errors import LossScaleError, OldFileError, UnsupportedError, first_line
from lossscale.packages import not_installed

_SIGNATURE = b"\x89HDF\r\n\x1a\n"

# Limits for reading, far above what it needs: CPU time and wall time.
_SECONDS, _BYTES_PER_SECOND = 10.0, 5e6
_PATIENCE = 12.0

_NO_END = "the HDF5 library does not come to an end with it."
_OUT_OF_TIME = {getattr(signal, "SIGXCPU", None)}


def is_hdf5(path: str | Path) -> bool:
    """Whether a file begins as an HDF5 file does."""
    try:
        with open(path, "rb") as file:
            return file.read(8) == _SIGNATURE
    except OSError:
        return False


@contextlib.contextmanager
def reporting_errors(start: str, *passing: type[Exception], end: str = "") -> Iterator[None]:
    """Converts every exception to an error about a file.

    Frameworks and a user's classes can raise any exception.

    Args:
        start: The start of the message; the cause follows.
        *passing: Exceptions that are raised as they are.
        end: The end of the message.

    Raises:
        OldFileError: Instead of other exceptions.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, LossScaleError) else first_line(error)
        raise OldFileError(f"{start}: {cause}{end}") from error


def reporting_file_errors(
    path: str | Path, reason: str = "damaged or incomplete"
) -> contextlib.AbstractContextManager[None]:
    """Converts every exception that the content of a file causes to an error that names the file.

    Args:
        path: The file.
        reason: The reason in the message.

    Raises:
        OldFileError: Instead of any exception except those of this library, warnings turned into
            errors, and missing packages.
    """
    return reporting_errors(f"{path}: {reason}", LossScaleError, ImportError, Warning)


def check_file(path: str | Path) -> None:
    """Reads an HDF5 or `.keras` file in a new process, to check that it can be read.

    A damaged HDF5 file can crash the library that reads it, or keep it busy forever, and this
    program with it. A process that only reads the file does no harm. Other files are not read.

    Args:
        path: The file. A missing file is not an error here.

    Raises:
        OldFileError: If it cannot be read.
        MissingPackageError: If h5py is not installed.
        UnsupportedError: If there is no Python interpreter to start, as in a frozen program.

    Examples:
        >>> import h5py, tempfile
        >>> path = tempfile.mkdtemp() + "/model.h5"
        >>> with h5py.File(path, "w") as file:
        ...     file["weight"] = [1.0, 2.0]
        >>> check_file(path)
    """
    if not Path(path).is_file() or not (is_hdf5(path) or zipfile.is_zipfile(path)):
        return
    if not sys.executable or getattr(sys, "frozen", False):
        raise UnsupportedError(
            "check_file() needs a Python interpreter to start, and there is none. "
            "Skip the check: load_model(path, check_first=False)."
        )
    seconds = _SECONDS + os.path.getsize(path) / _BYTES_PER_SECOND
    try:
        done = subprocess.run(
            # Without the program's folder in the path, because its modules could shadow others.
            [sys.executable, "-P", hdf5_reader.__file__, os.fspath(path), str(int(seconds))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_PATIENCE * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OldFileError(f"{path}: damaged: {_NO_END}") from None
    if done.returncode == hdf5_reader.NOT_INSTALLED:
        raise not_installed(["h5py"])
    if -done.returncode in _OUT_OF_TIME:
        raise OldFileError(f"{path}: damaged: {_NO_END}")
    if done.returncode == hdf5_reader.DAMAGED:
        raise OldFileError(f"{path}: damaged or incomplete: {done.stdout.strip()}")
    if done.returncode != hdf5_reader.READ:
        raise OldFileError(f"{path}: damaged: reading it crashes the HDF5 library.")

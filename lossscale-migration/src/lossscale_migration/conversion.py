"""Converts old files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lossscale.errors import OldFileError
from lossscale_migration.description import is_checkpoint
from lossscale_migration.graph import read_graph, write_hdf5
from lossscale_migration.loading import load_model
from lossscale_migration.saved_optimizer import find_optimizers

_PREFIX = ".lossscale-"
_OWNER = "owner"


def migrate_file(old: str | Path, new: str | Path, *, overwrite: bool = False) -> Path:
    """Converts an old file to one that Keras 3 reads on every backend.

    A model becomes a `.keras` file with a `lossscale.LossScaleOptimizer` and its state, for
    `keras.saving.load_model`. A checkpoint contains no model, only arrays and their names; it
    becomes an HDF5 file, which `restore_checkpoint` reads without TensorFlow.

    Args:
        old: A file that `describe_file` reads.
        new: The file to write: `.keras` for a model, `.h5` for a checkpoint.
        overwrite: Whether `new` may exist.

    Returns:
        The path of the new file.

    Raises:
        OldFileError: If `old` cannot be read, or `new` cannot be written. Nothing is written then,
            and an existing file stays as it was.
    """
    new = Path(new)
    checkpoint = is_checkpoint(old)
    check_new(old, new, checkpoint=checkpoint, overwrite=overwrite)
    try:
        # In the folder of the new file, because a rename is atomic only there.
        with _folder_beside(new) as folder:
            written = Path(folder, f"new{new.suffix}")
            if checkpoint:
                graph = read_graph(old)
                # Raises if there is none.
                find_optimizers(graph)
                write_hdf5(graph, written)
            else:
                load_model(old).save(written)
            check_new(old, new, checkpoint=checkpoint, overwrite=overwrite)
            os.replace(written, new)
    except OSError as error:
        raise OldFileError(f"{new}: cannot write it: {error}") from error
    return new


@contextlib.contextmanager
def _folder_beside(new: Path) -> Iterator[str]:
    """Creates a folder for an incomplete file, and removes folders left by killed processes."""
    for left in new.parent.glob(f"{_PREFIX}*"):
        _remove_abandoned(left, new)
    with (
        tempfile.TemporaryDirectory(dir=new.parent, prefix=_PREFIX) as folder,
        open(Path(folder, _OWNER), "wb") as owner,
    ):
        # The owner is written after the lock is taken, so a folder without a lock is not removed.
        if _locked(owner):
            owner.write(_mark(new))
            owner.flush()
        yield folder


def _remove_abandoned(folder: Path, new: Path) -> None:
    """Removes a folder that `_folder_beside` created for the same file in a process that ended.

    Only such a folder has an owner file with this content, and otherwise at most the new file. The
    lock on the owner file ends with the process.
    """
    try:
        names = {each.name for each in folder.iterdir()}
        if folder.is_symlink() or not {_OWNER} <= names <= {_OWNER, f"new{new.suffix}"}:
            return
        with open(folder / _OWNER, "r+b") as owner:
            if owner.read(2**16) == _mark(new) and _locked(owner):
                shutil.rmtree(folder)
    # A folder that cannot be read may belong to something else.
    except OSError:
        return


def _mark(new: Path) -> bytes:
    return b"lossscale-migrate, for " + os.fsencode(new.name)


def _locked(file: Any) -> bool:
    """Takes the lock on a file; returns whether it was free."""
    try:
        import fcntl
    except ImportError:  # Windows has no such call.
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_new(old: str | Path, new: Path, *, checkpoint: bool, overwrite: bool) -> None:
    """Raises unless a file of this name can be written.

    Raises:
        OldFileError: If the name has the wrong ending, its folder does not exist, or the file
            exists and must not be overwritten.
    """
    what, suffix = ("checkpoint", ".h5") if checkpoint else ("model", ".keras")
    if new.suffix != suffix:
        raise OldFileError(
            f"{new}: a {what} converts to a file that ends in {suffix}. Received: {old}."
        )
    if new.is_dir():
        raise OldFileError(f"{new}: is a folder.")
    if not new.parent.is_dir():
        raise OldFileError(f"{new}: its folder does not exist.")
    if new.exists() and not overwrite:
        raise OldFileError(
            f"{new}: this file exists. Nothing was written. Choose another name, or pass "
            "overwrite=True (--force)."
        )

"""Writing an old file anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lossscale.errors import OldFileError
from lossscale.migration.description import is_checkpoint
from lossscale.migration.graph import read_graph, write_hdf5
from lossscale.migration.loading import load_model
from lossscale.migration.saved import find_optimizers

MODEL_SUFFIX = ".keras"
STATE_SUFFIX = ".h5"


def migrate_file(old: str | Path, new: str | Path, *, overwrite: bool = False) -> Path:
    """Writes an old file as one that Keras 3 reads on every backend.

    A model becomes a `.keras` file with a `lossscale.LossScaleOptimizer` and its state, for
    `keras.saving.load_model`. A checkpoint has no model in it, only arrays and their names; it
    becomes an HDF5 file for `restore_checkpoint`, which needs no TensorFlow any more.

    Args:
        old: What `describe_file` reads.
        new: The file to write: `.keras` for a model, `.h5` for a checkpoint.
        overwrite: Whether `new` may exist.

    Returns:
        The path of the new file.

    Raises:
        OldFileError: If `old` cannot be read, or `new` cannot be written. Then nothing is
            written, and a file that was there is as it was.
    """
    new = Path(new)
    checkpoint = is_checkpoint(old)
    check_new(old, new, checkpoint=checkpoint, overwrite=overwrite)
    try:
        # In the folder of the new file: only there is a change of name a single act.
        with tempfile.TemporaryDirectory(dir=new.parent, prefix=".lossscale-") as folder:
            written = Path(folder, f"new{new.suffix}")
            if checkpoint:
                graph = read_graph(old)
                if not find_optimizers(graph):
                    raise OldFileError(f"{graph.path}: this checkpoint has no optimizer in it.")
                write_hdf5(graph, written)
            else:
                load_model(old).save(written)
            check_new(old, new, checkpoint=checkpoint, overwrite=overwrite)
            os.replace(written, new)
    except OSError as error:
        raise OldFileError(f"{new}: cannot be written: {error}") from error
    return new


def check_new(old: str | Path, new: Path, *, checkpoint: bool, overwrite: bool) -> None:
    """Raises unless a file of this name can be written.

    Raises:
        OldFileError: If the name is of another kind, its folder does not exist, or the file does
            and is not to be overwritten.
    """
    suffix = STATE_SUFFIX if checkpoint else MODEL_SUFFIX
    what = "checkpoint" if checkpoint else "model"
    if new.suffix != suffix:
        raise OldFileError(f"{new}: {old} is a {what}; the new file must end in {suffix}.")
    if new.is_dir():
        raise OldFileError(f"{new}: is a folder.")
    if not new.parent.is_dir():
        raise OldFileError(f"{new}: its folder does not exist.")
    if new.exists() and not overwrite:
        raise OldFileError(f"{new}: exists already. Nothing was written.")

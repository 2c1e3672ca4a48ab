"""`lossscale-migrate OLD [NEW]`: describes a file of an older TensorFlow, or converts it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lossscale.cli import keras_backend, parser_of, print_result, rows, shown
from lossscale.errors import ArgumentError, LossScaleWarning
from lossscale.packages import BACKENDS, is_installed, not_installed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status, as `lossscale.cli.main` does."""
    parser = parser_of(
        "lossscale-migrate",
        "Prints what a checkpoint or a model file of TensorFlow 2.0 to 2.15, tf_keras or Keras 3 "
        "holds of a loss scale optimizer. With NEW, converts it: a model to a .keras file, a "
        "checkpoint to an .h5 file for lossscale_migration.restore_checkpoint.",
    )
    olds = "the prefix of a checkpoint, its .index file or folder, or an HDF5 or .keras model"
    parser.add_argument("old", metavar="OLD", help=olds)
    parser.add_argument("new", metavar="NEW", nargs="?", type=Path, help="the file to write")
    parser.add_argument("--force", action="store_true", help="overwrite NEW if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return print_result(lambda: _migrate(parser.parse_args(argv)))


def _migrate(arguments: argparse.Namespace) -> str:
    if arguments.force and arguments.new is None:
        raise ArgumentError("--force needs NEW, the file to overwrite")
    needed = {"numpy", "h5py"}
    if Path(f"{arguments.old.removesuffix('.index')}.index").is_file():
        needed.add("tensorflow")
    if arguments.new is not None:
        backend = keras_backend()
        if backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ArgumentError(f"KERAS_BACKEND must be one of {known}. Received: {backend!r}.")
        needed |= {"keras", backend}
    if missing := sorted(name for name in needed if not is_installed(name)):
        raise not_installed(missing)
    with warnings.catch_warnings(record=True) as caught, _without_native_messages():
        warnings.simplefilter("always")
        # Not at the top: it needs NumPy.
        import lossscale_migration as migration

        # In a separate process, because a damaged file can crash it.
        migration.check_file(arguments.old)
        described = migration.describe_file(arguments.old)
        if arguments.new is not None:
            migration.migrate_file(arguments.old, arguments.new, overwrite=arguments.force)
    for warning in caught:
        if issubclass(warning.category, LossScaleWarning):
            print(f"lossscale: warning: {shown(warning.message)}", file=sys.stderr)
    written = None if arguments.new is None else str(arguments.new)
    if arguments.json:
        return json.dumps({**described.to_dict(), "written": written}, indent=2)
    texts = [f"{shown(described.path)}: {described.form}"]
    for optimizer in described.optimizers:
        texts.append(rows({name: _text(value) for name, value in vars(optimizer).items()}))
    return "\n".join(texts if written is None else [*texts, f"written: {shown(written)}"])


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(each)}" for name, each in value.items()) or None
    return f"{value:g}" if isinstance(value, float) else value


@contextlib.contextmanager
def _without_native_messages() -> Iterator[None]:
    """Drops standard error: TensorFlow has no setting for some of its notes there."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())

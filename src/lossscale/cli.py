"""The command `lossscale`: `info` prints versions, `migrate` reads files of an older TensorFlow."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from lossscale import __version__
from lossscale.errors import ArgumentError, LossScaleError, LossScaleWarning, visible
from lossscale.packages import PACKAGES, require


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage above the message; one line is easier to act on.
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = _Parser(prog="lossscale", description="Loss scaling for float16 training.")
    parser.add_argument("--version", action="version", version=f"lossscale {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    info = verbs.add_parser("info", help="print versions, for a bug report")
    info.set_defaults(run=_info)
    migrate = verbs.add_parser(
        "migrate",
        help="say what a file of an older TensorFlow holds, and write it for Keras 3",
        description="Prints what a checkpoint or a model file of TensorFlow 2.0 to 2.15, tf_keras "
        "or Keras 3 holds of a loss scale optimizer. With NEW, writes it anew: a model as a "
        ".keras file, a checkpoint as an .h5 file for lossscale.migration.restore_checkpoint.",
    )
    migrate.add_argument("old", metavar="OLD", help="a checkpoint, or an HDF5 or .keras model")
    migrate.add_argument("new", metavar="NEW", nargs="?", type=Path, help="the file to write")
    migrate.add_argument("--force", action="store_true", help="overwrite NEW if it exists")
    migrate.set_defaults(run=_migrate)
    for verb in (info, migrate):
        verb.add_argument("--json", action="store_true", help="print JSON in place of a text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: The arguments after the name of the program. By default those of the process.

    Returns:
        The exit status: 0; 1 if a package or a file cannot be used; 2 for a wrong argument or an
        old file that cannot be read. Then one line on standard error says what to do.
    """
    try:
        arguments = build_parser().parse_args(argv)
        print(arguments.run(arguments), flush=True)
    except (LossScaleError, OSError) as error:
        print(f"lossscale: {visible(' '.join(str(error).split()))}", file=sys.stderr)
        return 1 if isinstance(error, (ImportError, OSError)) else 2
    return 0


def _info(arguments: argparse.Namespace) -> str:
    found = {"lossscale": __version__, "python": platform.python_version()}
    found["platform"] = platform.platform()
    found["KERAS_BACKEND"] = os.environ.get("KERAS_BACKEND", "not set")
    for package in sorted({package.distribution for package in PACKAGES.values()}):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "-"
    return json.dumps(found, indent=2) if arguments.json else _lines(found)


def _migrate(arguments: argparse.Namespace) -> str:
    if arguments.force and arguments.new is None:
        raise ArgumentError("--force says that NEW may be overwritten, and there is no NEW")
    require("numpy", "h5py")
    if arguments.new is not None:
        require("keras", os.environ.get("KERAS_BACKEND") or "tensorflow")
    # TensorFlow's notes on the processor.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Keras reads its backend when it is imported.
    from lossscale import migration

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A crash of the library that reads it would be a crash of this command.
        migration.check_file(arguments.old)
        described = migration.describe_file(arguments.old)
        if arguments.new is not None:
            migration.migrate_file(arguments.old, arguments.new, overwrite=arguments.force)
    for warning in caught:
        if issubclass(warning.category, LossScaleWarning):
            print(f"lossscale: warning: {visible(warning.message)}", file=sys.stderr)
    written = None if arguments.new is None else str(arguments.new)
    if arguments.json:
        return json.dumps({**described.to_dict(), "written": written}, indent=2)
    texts = [visible(f"{described.path}: {described.form}")]
    texts += [_lines(vars(optimizer)) for optimizer in described.optimizers]
    return "\n".join(texts if written is None else [*texts, f"written: {visible(written)}"])


def _lines(rows: dict[str, Any]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {visible(value)}" for name, value in rows.items())

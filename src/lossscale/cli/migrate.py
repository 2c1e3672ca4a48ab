"""`lossscale migrate`: says what an old file holds, and writes it for Keras 3."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lossscale.cli.arguments import choose_backend
from lossscale.cli.console import new_console, silenced
from lossscale.cli.files import UsageError
from lossscale.errors import LossScaleError, LossScaleWarning, MissingPackageError, visible
from lossscale.packages import require

# Of the settings in a file, more than any optimizer has.
_LONGEST_CELL = 2000


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "migrate",
        help="say what a file of an older TensorFlow holds, and write it for Keras 3",
        description="Prints what a checkpoint or a model file of TensorFlow 2.0 to 2.15, tf_keras "
        "or Keras 3 holds of a loss scale optimizer. With NEW, writes it anew: a model as a "
        ".keras file, a checkpoint as an .h5 file for lossscale.migration.restore_checkpoint.",
    )
    parser.add_argument(
        "old",
        metavar="OLD",
        help="the prefix of a checkpoint, its .index file, a folder with checkpoints, or an HDF5 "
        "or .keras model",
    )
    parser.add_argument(
        "new", metavar="NEW", nargs="?", type=Path, help="the file to write (default: none)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite NEW if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Describes a file, and writes it anew if asked to.

    Args:
        arguments: `old`, `new`, `force` and `json`, as parsed.

    Returns:
        The exit status, 0.

    Raises:
        CommandError: If the file cannot be read or written.
        MissingPackageError: If a package is missing.
    """
    if arguments.force and arguments.new is None:
        raise UsageError("--force says that NEW may be overwritten, and there is no NEW")
    require(*_needed(arguments))
    choose_backend(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with silenced(), _ended_by_exception():
                description = _described(arguments)
        except MissingPackageError:
            raise
        except LossScaleError as error:
            raise UsageError(" ".join(str(error).split())) from error
    for warning in caught:
        if issubclass(warning.category, LossScaleWarning):
            print(f"lossscale: warning: {visible(warning.message)}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({**description.to_dict(), "written": _text(arguments.new)}, indent=2))
    else:
        _print(description, arguments.new)
    return 0


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Lets SIGTERM end the command by an exception, so that what is half written is removed."""

    def end(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    # Elsewhere a handler cannot be set, and one that a program has is its own.
    known = threading.current_thread() is threading.main_thread()
    if not known or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _described(arguments: argparse.Namespace) -> Any:
    # These need what was just checked, and Keras reads its backend when it is imported.
    from lossscale import migration

    # A crash of the library that reads it would be a crash of this command.
    migration.check_file(arguments.old)
    description = migration.describe_file(arguments.old)
    if arguments.new is not None:
        migration.migrate_file(arguments.old, arguments.new, overwrite=arguments.force)
    return description


def _needed(arguments: argparse.Namespace) -> Iterator[str]:
    yield from ("numpy", "h5py")
    if not arguments.json:
        yield "rich"
    if Path(f"{arguments.old}".removesuffix(".index") + ".index").is_file():
        yield "tensorflow"
    if arguments.new is not None:
        yield from ("keras", choose_backend(None))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _print(description: Any, written: Path | None) -> None:
    from rich.table import Table
    from rich.text import Text

    console = new_console()
    console.print(visible(f"{description.path}: {description.form}"), markup=False, soft_wrap=True)
    for optimizer in description.optimizers:
        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _rows(optimizer):
            table.add_row(name, Text(_cut(visible(value))))
        console.print(table)
    if written is not None:
        console.print(visible(f"Written: {written}"), markup=False, soft_wrap=True)


def _rows(optimizer: Any) -> list[tuple[str, str]]:
    slots = ", ".join(f"{name} ({count})" for name, count in optimizer.slots.items())
    settings = ", ".join(f"{name}={_number(v)}" for name, v in optimizer.settings.items())
    scale = _number(optimizer.scale)
    if optimizer.scaling == "dynamic" and optimizer.good_steps is None:
        scale += " at the start; the file does not hold the current one"
    return [
        ("in the file at", optimizer.path or "(root)"),
        ("written by", optimizer.era),
        ("optimizer", optimizer.optimizer or "not named in the file"),
        ("loss scaling", optimizer.scaling),
        ("loss scale", scale),
        ("good steps", _number(optimizer.good_steps)),
        ("iterations", _number(optimizer.iterations)),
        ("learning rate", _number(optimizer.learning_rate)),
        ("settings", settings or "-"),
        ("slots", slots or "-"),
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}..."


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)

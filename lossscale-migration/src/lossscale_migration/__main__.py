"""`lossscale-migrate OLD [NEW]`: describes a file of an older TensorFlow, or converts it."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lossscale import __version__
from lossscale.errors import ArgumentError, LossScaleError, LossScaleWarning
from lossscale.packages import BACKENDS, is_installed, not_installed

_LONGEST = 2000
"""Characters of a value from a file; the middle of a longer one is left out."""
# C0 and C1 controls, marks that change the text direction, line separators, surrogates.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage above the message; one line is easier to act on.
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: The arguments after the name of the program. By default those of the process.

    Returns:
        The exit status: 0; 1 if a package is missing or the output cannot be written; 2 for a
        wrong argument, or a file that cannot be read or written. Unless it is 0, one line on
        standard error reports the reason. A reader that closes the output early, such as `head`,
        is status 1 without a line.
    """
    parser = _Parser(
        prog="lossscale-migrate",
        description="Prints what a checkpoint or a model file of TensorFlow 2.0 to 2.15, tf_keras "
        "or Keras 3 holds of a loss scale optimizer. With NEW, converts it: a model to a .keras "
        "file, a checkpoint to an .h5 file for lossscale_migration.restore_checkpoint.",
    )
    parser.add_argument("--version", action="version", version=f"lossscale {__version__}")
    olds = "the prefix of a checkpoint, its .index file or folder, or an HDF5 or .keras model"
    parser.add_argument("old", metavar="OLD", help=olds)
    parser.add_argument("new", metavar="NEW", nargs="?", type=Path, help="the file to write")
    parser.add_argument("--force", action="store_true", help="overwrite NEW if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack characters of the file.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(_migrate(parser.parse_args(argv)), flush=True)
    except BrokenPipeError:
        return 1
    except (LossScaleError, OSError) as error:
        print(f"lossscale: {_shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 1 if isinstance(error, (ImportError, OSError)) else 2
    except KeyboardInterrupt:
        return 130
    return 0


def _migrate(arguments: argparse.Namespace) -> str:
    if arguments.force and arguments.new is None:
        raise ArgumentError("--force needs NEW, the file to overwrite")
    needed = {"numpy", "h5py"}
    if Path(f"{arguments.old.removesuffix('.index')}.index").is_file():
        needed.add("tensorflow")
    if arguments.new is not None:
        backend = _keras_backend()
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
            print(f"lossscale: warning: {_shown(warning.message)}", file=sys.stderr)
    written = None if arguments.new is None else str(arguments.new)
    if arguments.json:
        return json.dumps({**described.to_dict(), "written": written}, indent=2)
    texts = [f"{_shown(described.path)}: {described.form}"]
    for optimizer in described.optimizers:
        values = {name: _text(value) for name, value in vars(optimizer).items()}
        width = max(map(len, values))
        texts += [f"  {name:{width}}  {_shown(value)}" for name, value in values.items()]
    return "\n".join(texts if written is None else [*texts, f"written: {_shown(written)}"])


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(each)}" for name, each in value.items()) or None
    return f"{value:g}" if isinstance(value, float) else value


def _shown(value: object) -> str:
    """Returns a value as one printable, short text; "-" for nothing."""
    if value is None:
        return "-"
    text = _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(value))
    left_out, half = len(text) - _LONGEST, _LONGEST // 2
    if left_out <= 0:
        return text
    return f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"


def _keras_backend() -> str:
    """Returns the backend that Keras 3 uses when it is imported, by its own order of settings."""
    folder = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    try:
        configured = json.loads(Path(folder, "keras.json").read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        # Keras ignores a file that it cannot read, too.
        configured = "tensorflow"
    return os.environ.get("KERAS_BACKEND") or str(configured)


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

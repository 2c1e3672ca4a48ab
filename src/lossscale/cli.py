"""The command `lossscale`: `info` prints versions, `migrate` reads files of older releases."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from lossscale import __version__
from lossscale.errors import ArgumentError, LossScaleError, LossScaleWarning, shortened, visible
from lossscale.packages import BACKENDS, PACKAGES, require

# Libraries whose training loops call the optimizer.
_TRAINERS = ("accelerate", "equinox", "flax", "lightning", "transformers")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage above the message; one line is easier to act on.
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = _Parser(prog="lossscale", description="Loss scaling for float16 training.")
    parser.add_argument("--version", action="version", version=f"lossscale {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    about = "Prints versions, the backend of Keras 3 and the GPUs, for a bug report."
    info = verbs.add_parser("info", help=about, description=f"{about} Imports no framework.")
    info.set_defaults(run=_info)
    migrate = verbs.add_parser(
        "migrate",
        help="Describes a file of an older TensorFlow, or converts it for Keras 3.",
        description="Prints what a checkpoint or a model file of TensorFlow 2.0 to 2.15, tf_keras "
        "or Keras 3 holds of a loss scale optimizer. With NEW, converts it: a model to a .keras "
        "file, a checkpoint to an .h5 file for lossscale.migration.restore_checkpoint.",
    )
    olds = "the prefix of a checkpoint, its .index file or folder, or an HDF5 or .keras model"
    migrate.add_argument("old", metavar="OLD", help=olds)
    migrate.add_argument("new", metavar="NEW", nargs="?", type=Path, help="the file to write")
    migrate.add_argument("--force", action="store_true", help="overwrite NEW if it exists")
    migrate.set_defaults(run=_migrate)
    for verb in (info, migrate):
        verb.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack characters of the file.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = build_parser().parse_args(argv)
        print(arguments.run(arguments), flush=True)
    except BrokenPipeError:
        return 1
    except (LossScaleError, OSError) as error:
        print(f"lossscale: {_shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 1 if isinstance(error, (ImportError, OSError)) else 2
    except KeyboardInterrupt:
        return 130
    return 0


def _info(arguments: argparse.Namespace) -> str:
    # A module may come from a distribution of another name, such as tensorflow-cpu.
    distributions = metadata.packages_distributions()
    versions = {
        module: metadata.version(distributions[module][0]) if module in distributions else None
        for module in sorted({*PACKAGES, *_TRAINERS})
    }
    gpus = _gpus()
    found = {
        "lossscale": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "keras_backend": _keras_backend(),
    }
    if arguments.json:
        return json.dumps({**found, "gpus": gpus, "packages": versions}, indent=2)
    return _rows({**found, "gpus": ", ".join(gpus) or None, **versions})


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _keras_backend() -> str:
    """Returns the backend that Keras 3 uses when it is imported, by its own order of settings."""
    folder = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    try:
        configured = json.loads(Path(folder, "keras.json").read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        # Keras ignores a file that it cannot read, too.
        configured = "tensorflow"
    return os.environ.get("KERAS_BACKEND") or str(configured)


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
    require(*sorted(needed))
    with warnings.catch_warnings(record=True) as caught, _without_native_messages():
        warnings.simplefilter("always")
        # Not at the top: it needs NumPy.
        from lossscale import migration

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
    texts += [_rows(vars(optimizer)) for optimizer in described.optimizers]
    return "\n".join(texts if written is None else [*texts, f"written: {_shown(written)}"])


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


def _rows(values: Mapping[str, Any]) -> str:
    width = max(map(len, values))
    return "\n".join(f"  {name:{width}}  {_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}={_shown(each)}" for name, each in value.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return visible(shortened(text))

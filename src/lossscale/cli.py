"""The command `lossscale info`: versions, the backend of Keras 3 and the GPUs, for a bug report."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from lossscale import __version__
from lossscale.errors import ArgumentError, LossScaleError, shortened, visible
from lossscale.packages import EXTRAS, OLD_FILES

# Libraries whose training loops call the optimizer.
_TRAINERS = ("accelerate", "equinox", "flax", "lightning", "transformers")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage above the message; one line is easier to act on.
        hint = OLD_FILES if "'migrate'" in message else f"see {self.prog} --help"
        raise ArgumentError(f"{message} ({hint})")


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser whose errors are one line."""
    parser = _Parser(prog=name, description=description)
    parser.add_argument("--version", action="version", version=f"lossscale {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; see `print_result`.

    Args:
        argv: The arguments after the name of the program. By default those of the process.
    """
    parser = parser_of("lossscale", "Loss scaling for float16 training.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    about = "Prints versions, the backend of Keras 3 and the GPUs, for a bug report."
    info = verbs.add_parser("info", help=about, description=f"{about} Imports no framework.")
    info.set_defaults(run=_info)
    return print_result(lambda: str(parser.parse_args(argv).run()))


def print_result(run: Callable[[], str]) -> int:
    """Prints the text that a command returns.

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
        print(run(), flush=True)
    except BrokenPipeError:
        return 1
    except (LossScaleError, OSError) as error:
        print(f"lossscale: {shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 1 if isinstance(error, (ImportError, OSError)) else 2
    except KeyboardInterrupt:
        return 130
    return 0


def _info() -> str:
    # A module may come from a distribution of another name, such as tensorflow-cpu.
    distributions = metadata.packages_distributions()
    versions = {
        module: metadata.version(distributions[module][0]) if module in distributions else None
        for module in sorted({*EXTRAS, *_TRAINERS})
    }
    found = {
        "lossscale": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "keras_backend": keras_backend(),
        "gpus": ", ".join(_gpus()) or None,
    }
    return rows({**found, **versions})


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def keras_backend() -> str:
    """Returns the backend that Keras 3 uses when it is imported, by its own order of settings."""
    folder = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    try:
        configured = json.loads(Path(folder, "keras.json").read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        # Keras ignores a file that it cannot read, too.
        configured = "tensorflow"
    return os.environ.get("KERAS_BACKEND") or str(configured)


def rows(values: Mapping[str, object]) -> str:
    """Returns a line for each value."""
    width = max(map(len, values))
    return "\n".join(f"  {name:{width}}  {shown(value)}" for name, value in values.items())


def shown(value: object) -> str:
    """Returns a value as one printable, short text; "-" for nothing."""
    return "-" if value is None else visible(shortened(str(value)))

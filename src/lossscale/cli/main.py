"""The command `lossscale`: reads the verb and hands over to its file."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lossscale import __version__
from lossscale.cli import demo, diagnose, info, migrate, plot, simulate
from lossscale.cli.files import CommandError, UsageError
from lossscale.errors import MissingPackageError, shortened, visible


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage above the message; one line is easier to act on.
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line, one subcommand per verb."""
    parser = _Parser(prog="lossscale", description="Loss scaling for float16 training.")
    parser.add_argument("--version", action="version", version=f"lossscale {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    demo.add_parser(verbs)
    migrate.add_parser(verbs)
    diagnose.add_parser(verbs)
    plot.add_parser(verbs)
    simulate.add_parser(verbs)
    info.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: The arguments after the name of the program. By default those of the process.

    Returns:
        The exit status: 0, or 1 if the command cannot go on, or 2 for an argument that cannot
        be used. Either way one line on standard error says what to do. Also 1, without a word, if
        nobody reads the output any more.
    """
    if sys.stdout is None:
        print("lossscale: the standard output is closed", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A sign or a file name that the locale has no letters for is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            arguments = build_parser().parse_args(argv)
            status: int = arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except (CommandError, MissingPackageError) as error:
        print(f"lossscale: {visible(shortened(str(error)))}", file=sys.stderr)
        return error.exit_status if isinstance(error, CommandError) else 1
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does.
        _forget_what_cannot_be_written()
        return 1
    except OSError as error:
        _forget_what_cannot_be_written()
        named = "" if error.filename is None else f"{error.filename}: "
        reason = error.strerror or str(error)
        print(f"lossscale: {visible(shortened(named + reason))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _forget_what_cannot_be_written() -> None:
    """Lets go of the standard output if it is full or gone: Python flushes once more as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

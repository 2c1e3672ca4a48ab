"""Files that verbs read and write, and the one line that says what is wrong with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lossscale.cli.console import progress
from lossscale.errors import LossScaleError, MissingPackageError

PICTURE_FORMATS = (".png", ".pdf", ".svg")


class CommandError(Exception):
    """The command cannot go on. Its text is shown after the name of the program."""

    exit_status = 1


class UsageError(CommandError):
    """An argument cannot be used."""

    exit_status = 2


def check_picture(option: str, path: Path, formats: tuple[str, ...] = PICTURE_FORMATS) -> None:
    """Raises unless a picture, or another file, can be written there.

    Args:
        option: What the user gave the path as, for the message.
        path: The file.
        formats: What it may end in.

    Raises:
        UsageError: If its ending is another one, or it cannot be written.
    """
    if path.suffix.lower() not in formats:
        raise UsageError(f"{option} must end in {', '.join(formats)}. Received: {str(path)!r}")
    try:
        if not path.parent.is_dir():
            raise UsageError(f"{option} is in a folder that does not exist: {str(path.parent)!r}")
        if path.is_dir():
            raise UsageError(f"{option} is a folder: {str(path)!r}")
        existed = path.exists()
        # Only trying tells: of /proc, of a disk that is read only.
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} cannot be written: {str(path)!r}: {error.strerror}") from error


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what is wrong with a file or an argument into one line and exit status 2."""
    try:
        yield
    except MissingPackageError:
        raise
    except LossScaleError as error:
        raise UsageError(" ".join(str(error).split())) from error
    except OSError as error:
        reason = error.strerror or str(error)
        named = "" if error.filename is None else f"{error.filename}: "
        raise UsageError(f"{named}{reason}") from error


def read_history(path: Path) -> Any:
    """Reads the history of a training run.

    Args:
        path: The file.

    Raises:
        UsageError: If it cannot be read, is no history, or has no step.
    """
    from lossscale.monitoring import TrainingHistory

    with usage_errors(), progress(f"Reading {path.name}", path.stat().st_size) as show:
        history = TrainingHistory.read(path, after_bytes=show)
    if not history.records:
        raise UsageError(f"{path}: the history has no steps yet")
    return history

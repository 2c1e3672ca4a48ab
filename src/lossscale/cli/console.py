"""Where verbs print tables and progress."""

from __future__ import annotations

import os
from typing import Any, TextIO


def new_console(file: TextIO | None = None, *, stderr: bool = False) -> Any:
    """Returns a rich Console, which writes no escape sequence if NO_COLOR is set.

    Args:
        file: What to write to; by default standard output.
        stderr: Whether to write to standard error.
    """
    from rich.console import Console

    # By itself rich leaves out the colours, and goes on with bold text and moving bars.
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        file=file, stderr=stderr, highlight=False, force_terminal=False if plain else None
    )

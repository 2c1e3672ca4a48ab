"""Where verbs print tables, and what they show on standard error while something takes long."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from lossscale.packages import is_installed

_SHOWN_AFTER = 1.0
_BETWEEN_LINES = 10.0


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


@contextlib.contextmanager
def waiting(describe: Callable[[], str]) -> Iterator[None]:
    """Says on standard error what is being done, from the first second on.

    On a terminal in a line that changes each second and goes at the end; elsewhere in a line after
    a second and after each ten more.

    Args:
        describe: Returns what is being done.
    """
    started, done = time.monotonic(), threading.Event()

    def tick() -> None:
        pause = _SHOWN_AFTER
        while not done.wait(pause):
            line = f"lossscale: {describe()} ({time.monotonic() - started:.0f} s)"
            stream.write(f"\r{line:<79}" if is_terminal else f"{line}\n")
            stream.flush()
            pause = _SHOWN_AFTER if is_terminal else _BETWEEN_LINES

    # A stream of its own, because what frameworks write to standard error is dropped meanwhile.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as stream:
        is_terminal = stream.isatty()
        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            if is_terminal:
                stream.write(f"\r{'':<79}\r")


@contextlib.contextmanager
def progress(
    description: str, total: int, *, at_once: bool = False
) -> Iterator[Callable[[int], None]]:
    """Shows a bar on standard error, if it is a terminal and the work takes over a second.

    Args:
        description: What is being done.
        total: How much there is to do.
        at_once: Whether to show the bar from the start, since each part takes over a second.

    Yields:
        What to call with how much is done so far.
    """
    if not is_installed("rich"):
        # The bar is a convenience, and the work can be done without it.
        yield lambda done: None
        return
    from rich.progress import Progress

    started = -math.inf if at_once else time.monotonic()
    console = new_console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(description, total=total)
    shown = False

    def show(done: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > _SHOWN_AFTER:
            bar.start()
            shown = True
        bar.update(task, completed=done)

    try:
        show(0)
        yield show
    finally:
        if shown:
            bar.stop()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drops what is written to standard error meanwhile, by compiled code as well.

    TensorFlow writes some notes as it is imported that TF_CPP_MIN_LOG_LEVEL does not reach.
    Exceptions are raised as ever.
    """
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

"""What is shown on standard error while something takes long."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from lossscale.cli.console import new_console
from lossscale.packages import is_installed

_SHOWN_AFTER = 1.0


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

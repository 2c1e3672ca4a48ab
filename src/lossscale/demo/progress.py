"""How far the demo is: bars on a terminal, lines elsewhere. Needs rich, and no framework."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lossscale.demo.experiment import Recipe, Run

_SECONDS_BETWEEN_LINES = 2.0


@contextlib.contextmanager
def waiting(console: Any, text: str) -> Iterator[None]:
    """Shows that something takes its time.

    Args:
        console: The rich Console to show it on.
        text: What is being done.
    """
    if _can_redraw(console):
        with console.status(text):
            yield
    else:
        console.print(f"{text} ...")
        yield


@contextlib.contextmanager
def training(
    console: Any, recipes: Sequence[Recipe], epochs: int
) -> Iterator[Callable[[Run], None]]:
    """Shows how far each run is, and the test accuracy it has reached.

    Args:
        console: The rich Console to show it on.
        recipes: The ways to train, in the order of their runs.
        epochs: Epochs of each run.

    Yields:
        What to call with the run so far after each of its epochs.
    """
    if not _can_redraw(console):
        yield _lines(console, max(len(recipe.name) for recipe in recipes), epochs)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("epoch {task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            recipe.name: progress.add_task(recipe.name, total=epochs, note="") for recipe in recipes
        }

        def show(run: Run) -> None:
            note = f"test accuracy {run.accuracy[-1]:6.1%}"
            progress.update(tasks[run.recipe.name], completed=len(run.accuracy), note=note)

        yield show


def _can_redraw(console: Any) -> bool:
    return bool(console.is_terminal and not console.is_dumb_terminal)


def _lines(console: Any, width: int, epochs: int) -> Callable[[Run], None]:
    last = time.monotonic()

    def show(run: Run) -> None:
        nonlocal last
        done, now = len(run.accuracy), time.monotonic()
        if done in (1, epochs) or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            name = run.recipe.name.ljust(width)
            console.print(f"{name}  epoch {done}/{epochs}  test accuracy {run.accuracy[-1]:6.1%}")

    return show

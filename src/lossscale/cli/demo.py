"""`lossscale demo`: trains digits in float16 without loss scaling and with it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lossscale.cli.backend import BACKENDS, check_installed, choose_backend, silenced
from lossscale.cli.files import check_picture
from lossscale.cli.numbers import integer, seed

_PACKAGES = {
    "keras": "keras",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "rich": "rich",
    "sklearn": "scikit-learn",
}


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "demo",
        help="train handwritten digits in float16, without loss scaling and with it",
        description="Trains a small Keras classifier on the handwritten digits of scikit-learn "
        "four ways: in float32, and in float16 without loss scaling, with a fixed scale and with "
        "a dynamic one. Prints a table and writes a picture. Nothing is downloaded.",
    )
    parser.add_argument(
        "--backend",
        metavar="|".join(BACKENDS),
        help="what Keras computes with (default: the environment variable KERAS_BACKEND, or "
        "tensorflow)",
    )
    parser.add_argument(
        "--epochs", type=_epochs, default=20, help="epochs of each run (default: 20)"
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="seed of the weights, of the order of the images and of the choice of test images "
        "(default: 0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo.png"),
        metavar="FILE",
        help="the picture to write: .png, .pdf or .svg (default: demo.png)",
    )
    parser.set_defaults(run=run)


def _epochs(text: str) -> int:
    return integer(text, 1, 1000)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo.

    Args:
        arguments: `backend`, `epochs`, `seed` and `output`, as parsed.

    Returns:
        The exit status, 0.

    Raises:
        CommandError: If an argument cannot be used or a package is missing.
    """
    check_picture("--output", arguments.output)
    backend = choose_backend(arguments.backend)
    check_installed(backend, _PACKAGES)
    # These need what was just checked, and Keras reads its backend when it is imported.
    from rich.console import Console

    from lossscale.cli import report

    started = time.perf_counter()
    console = Console(highlight=False)
    report.introduce(console, backend, arguments.epochs, arguments.seed)
    runs, gradients = _train_all(console, backend, arguments.epochs, arguments.seed)
    report.print_table(console, runs)
    report.draw(runs, gradients, arguments.output)
    console.print(f"Picture: {arguments.output}", soft_wrap=True, markup=False)
    console.print(f"Time:    {time.perf_counter() - started:.0f} seconds in all")
    return 0


def _train_all(console: Any, backend: str, epochs: int, seed: int) -> tuple[list[Any], Any]:
    from rich.progress import BarColumn, Progress, TextColumn

    # Keras imports TensorFlow late, whatever the backend, if it is installed.
    with console.status("Importing Keras"), silenced():
        from lossscale.cli import digits

        if backend == "torch":
            import torch

            # The arrays are small. On a busy machine two threads wait for each other for minutes.
            torch.set_num_threads(1)
        data = digits.load_digits(seed)
        probe = digits.make_probe(data, seed)
        gradients = probe.gradients("float32", digits.build_model("float32", seed).get_weights())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("epoch {task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [
            progress.add_task(recipe.name, total=epochs, start=False, note="")
            for recipe in digits.RECIPES
        ]
        runs = []
        for task, recipe in zip(tasks, digits.RECIPES, strict=True):

            def show(run: digits.Run, task: Any = task) -> None:
                note = f"test accuracy {run.accuracy[-1]:6.1%}"
                progress.update(task, completed=len(run.accuracy), note=note)

            progress.start_task(task)
            runs.append(
                digits.train(recipe, data, epochs=epochs, seed=seed, probe=probe, after_epoch=show)
            )
    return runs, gradients

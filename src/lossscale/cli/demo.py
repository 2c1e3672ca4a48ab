"""`lossscale demo`: trains digits in float16 without loss scaling and with it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from lossscale.cli.arguments import choose_backend, integer, seed
from lossscale.cli.console import new_console, silenced
from lossscale.cli.files import check_picture, usage_errors
from lossscale.packages import BACKENDS, require

NATIVE = {
    "torch-native": (("torch",), "PyTorch, without Keras"),
    "optax": (("jax", "optax"), "Optax on JAX, without Keras"),
}
"""What trains without Keras: the packages that it needs beside the others, and its name."""

_ENVIRONMENT = {
    # The arrays are small: on a busy machine two threads wait for each other most of the time.
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # oneDNN has float16 kernels for some processors that take 10 times as long as TensorFlow's.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
"""What the backends read when they are imported, unless the user has set it."""


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "demo",
        help="train handwritten digits in float16, without loss scaling and with it",
        description="Trains a small classifier on the handwritten digits of scikit-learn "
        "four ways: in float32, and in float16 without loss scaling, with a fixed scale and with "
        "a dynamic one. Prints a table and writes a picture. Nothing is downloaded.",
    )
    parser.add_argument(
        "--backend",
        metavar="|".join((*BACKENDS, *NATIVE)),
        help="what Keras computes with (default: the environment variable KERAS_BACKEND, or "
        "tensorflow); torch-native and optax train without Keras",
    )
    parser.add_argument(
        "--epochs", type=_epochs, default=15, help="epochs of each run (default: 15)"
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
        CommandError: If an argument cannot be used.
        MissingPackageError: If a package is missing.
    """
    check_picture("--output", arguments.output)
    if arguments.backend in NATIVE:
        backend = arguments.backend
        packages, framework = NATIVE[backend]
    else:
        backend = choose_backend(arguments.backend, NATIVE)
        packages, framework = ("keras", backend), f"Keras on {backend}"
    require("matplotlib", "numpy", "rich", "sklearn", *packages)
    # These need what was just checked.
    from lossscale.demo import output

    started = time.perf_counter()
    console = new_console()
    output.introduce(console, framework, arguments.epochs, arguments.seed)
    runs, report = _train_all(console, framework, backend, arguments.epochs, arguments.seed)
    output.print_table(console, runs)
    with usage_errors():
        output.draw(runs, report, arguments.output)
    console.print(f"Picture: {arguments.output}", soft_wrap=True, markup=False)
    console.print(f"Time:    {time.perf_counter() - started:.0f} seconds in all")
    return 0


def _training_on(backend: str) -> Any:
    from lossscale.demo import optax_training, torch_training, training

    return {"torch-native": torch_training, "optax": optax_training}.get(backend, training)


def _train_all(
    console: Any, framework: str, backend: str, epochs: int, seed: int
) -> tuple[list[Any], Any]:
    """Trains four ways; the runs, and the diagnosis at the first weights."""
    from lossscale.demo import progress
    from lossscale.demo.experiment import RECIPES, load_digits

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Keras reads its backend when it is imported, and imports TensorFlow late, whatever the
    # backend, if it is installed.
    with progress.waiting(console, f"Importing {framework.split()[0].strip(',')}"), silenced():
        module = _training_on(backend)
        data = load_digits(seed)
        probe = module.make_probe(data, seed)
        report = probe.report(module.first_weights(seed))
    with progress.training(console, RECIPES, epochs) as show:
        runs = [
            module.train(recipe, data, epochs=epochs, seed=seed, probe=probe, after_epoch=show)
            for recipe in RECIPES
        ]
    return runs, report

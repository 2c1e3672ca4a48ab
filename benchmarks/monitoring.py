"""What a monitor costs in `fit`: `python -m benchmarks.monitoring`.

One process for each backend. In each round every variant trains for one epoch of many short steps,
which is the worst case: what a monitor does on a step does not grow with the model, unless it
counts histograms. All of them write a history.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.timing import as_numbers, interleave, quartiles, ratios

BEGIN, END = "<!-- monitoring: make bench -->", "<!-- end of monitoring -->"
LIBRARIES = {"tensorflow": "keras", "jax": "keras", "torch": "keras", "tf_keras": "tf_keras"}
"""What is measured to the library that it is of."""

BACKENDS = tuple(LIBRARIES)
VARIANTS: dict[str, dict[str, Any] | None] = {
    "no monitor": None,
    "every step": {"every": 1},
    "every 100 steps": {"every": 100},
    "every 100 steps, with histograms": {"every": 100, "histograms": True},
    "every 100 steps, with fidelity": {"every": 100, "fidelity_every": 100},
}
STEPS, BATCH, WIDTH = 300, 64, 256


class Epoch:
    """An epoch of `fit`.

    Args:
        settings: Arguments of the monitor; None for no monitor.
        steps: How many steps an epoch has.
        history: Where the monitor writes.
    """

    fresh_each_step = False

    def __init__(self, settings: dict[str, Any] | None, steps: int, history: pathlib.Path) -> None:
        import numpy as np

        import lossscale
        from lossscale.callbacks import LossScaleMonitor

        name = os.environ.get("LOSSSCALE_BENCH_LIBRARY", "keras")
        keras: Any = importlib.import_module(name)
        keras.utils.set_random_seed(0)
        self._model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(WIDTH, activation="relu"),
                keras.layers.Dense(WIDTH, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        self._model.compile(
            lossscale.LossScaleOptimizer(keras.optimizers.Adam()),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        random = np.random.default_rng(0)
        self._x = random.normal(size=(steps * BATCH, 64)).astype("float32")
        self._y = random.integers(0, 10, steps * BATCH)
        self._callbacks: list[Any] = []
        if settings is not None:
            if "fidelity_every" in settings:
                settings = {**settings, "fidelity_data": (self._x[:BATCH], self._y[:BATCH])}
            self._callbacks = [LossScaleMonitor(history, append=True, framework=name, **settings)]

    def prepare(self) -> None:
        """The data stay what they are."""

    def step(self) -> None:
        self._model.fit(
            self._x, self._y, batch_size=BATCH, verbose=0, callbacks=list(self._callbacks)
        )

    def wait(self) -> None:
        """`fit` has waited for the last step already."""


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Returns seconds for a step and ratios to no monitor, by variant; JSON-ready."""
    with tempfile.TemporaryDirectory() as folder:
        epochs = {
            name: Epoch(settings, steps, pathlib.Path(folder) / f"{number}.jsonl")
            for number, (name, settings) in enumerate(VARIANTS.items())
        }
        for epoch in epochs.values():
            epoch.step()
        times = interleave(epochs, rounds=rounds, steps=1)
    return {
        name: {
            "seconds_per_step": as_numbers(quartiles([t / steps for t in times[name]])),
            "ratio": as_numbers(ratios(times[name], times["no monitor"])),
        }
        for name in epochs
    }


def table(results: dict[str, Any]) -> str:
    """Returns the results as Markdown."""

    def cell(found: dict[str, Any]) -> str:
        ratio = found["ratio"]
        return f"{ratio['median']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"

    compared = [name for name in VARIANTS if VARIANTS[name] is not None]
    lines = [
        "| Keras on | ms a step, no monitor | " + " | ".join(compared) + " |",
        "|---|---|" + "---|" * len(compared),
    ]
    for backend, found in results.items():
        base = 1000 * found["no monitor"]["seconds_per_step"]["median"]
        cells = " | ".join(cell(found[name]) for name in compared)
        lines.append(f"| {backend} | {base:.2f} | {cells} |")
    return "\n".join(lines)


def _in_a_process(backend: str, rounds: int, steps: int) -> dict[str, Any]:
    size = ["--rounds", str(rounds), "--steps", str(steps)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.monitoring", "--here", *size],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={
            **os.environ,
            "KERAS_BACKEND": "tensorflow" if LIBRARIES[backend] == "tf_keras" else backend,
            "LOSSSCALE_BENCH_LIBRARY": LIBRARIES[backend],
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(command_line: list[str], run: Callable[..., Any] = _in_a_process) -> int:
    """Measures on each backend, and writes a JSON file and a table into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitoring")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(command_line)
    if options.here:
        print(json.dumps(measure(options.rounds, options.steps)))
        return 0
    results = {backend: run(backend, options.rounds, options.steps) for backend in BACKENDS}
    print(table(results))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.page is not None:
        from benchmarks.pages import insert

        insert(options.page, table(results), BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

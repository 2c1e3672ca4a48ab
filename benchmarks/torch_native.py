"""What loss scaling costs on PyTorch itself: `python -m benchmarks.torch_native`.

An AdamW alone, and beside it the same with `lossscale.torch` and with `torch.amp.GradScaler`. All
have one list of parameters and one list of gradients, which are put back before each step, and a
state of their own. Times are processor time of one thread. A step scales a loss, steps the
optimizer and moves the scale; the backward pass is in the rows of whole steps only, which compute
in float32: what loss scaling costs does not depend on that, and float16 is slow on processors.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import lossscale
from benchmarks.timing import as_numbers, interleave, quartiles, ratios

BEGIN, END = "<!-- torch_native: make bench -->", "<!-- end of torch_native -->"
SCALE, CLIP = 2.0**15, 1.0
SHAPES = {"10M in 100": (100, (320, 312)), "200 x 1000": (200, (1000,))}
FLAGS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
METHODS = {
    "bare": "the optimizer alone",
    "wrapper": "LossScaleOptimizer",
    "device": "LossScaleOptimizer, decide='device'",
    "fixed": "LossScaleOptimizer, a fixed scale",
    "drop-in": "lossscale.torch.GradScaler",
    "GradScaler": "torch.amp.GradScaler",
    "bare, clip": "the optimizer after clip_grad_norm_",
    "wrapper, clip": "LossScaleOptimizer, clip_norm",
    "GradScaler, clip": "torch.amp.GradScaler: unscale_, clip_grad_norm_",
}
"""Each is compared with the first, and those that clip with the first that does."""


class Alone:
    """A way of making a step with gradients that were computed before.

    Args:
        name: One of `METHODS`.
        parameters: The parameters, with gradients.
        gradients: Their values before a step, not scaled.
        flag: What selects the implementation of the optimizer.
    """

    fresh_each_step = True

    def __init__(
        self,
        name: str,
        parameters: Sequence[Any],
        gradients: Sequence[Any],
        flag: dict[str, bool],
    ) -> None:
        self.optimizer, self._step = stepper(name, parameters, flag)
        factor = 1.0 if name.startswith("bare") else SCALE
        self._parameters = parameters
        self._given = gradients if factor == 1.0 else [g * factor for g in gradients]
        self._loss = torch.ones(())

    def prepare(self) -> None:
        # In place, because optimizers and scalers may keep what they know of them.
        torch._foreach_copy_([p.grad for p in self._parameters], list(self._given))

    def step(self) -> None:
        self._step(self._loss)

    def wait(self) -> None:
        """The processor has nothing to wait for."""


class Train:
    """A whole training step."""

    fresh_each_step = False

    def __init__(self, name: str, model: Any, batch: tuple[Any, Any]) -> None:
        self.optimizer, self._step = stepper(name, list(model.parameters()), FLAGS["fused"], True)
        self._model, (self._x, self._y) = model, batch

    def prepare(self) -> None:
        """The batch stays what it is."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._step(torch.nn.functional.cross_entropy(self._model(self._x), self._y))

    def wait(self) -> None:
        """The processor has nothing to wait for."""


def stepper(
    name: str, parameters: Sequence[Any], flag: dict[str, bool], backward: bool = False
) -> tuple[Any, Callable[[Any], None]]:
    """Returns an optimizer, and what makes a step of a loss with it in the way of that name."""
    # A rate that leaves the parameters where they are, which all ways share.
    inner = torch.optim.AdamW(parameters, lr=1e-12, weight_decay=0.0, **flag)
    way, _, clips = name.partition(", ")

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)

    if way == "bare":

        def bare(loss: Any) -> None:
            if backward:
                loss.backward()
            if clips:
                clip()
            inner.step()

        return inner, bare
    if way in ("GradScaler", "drop-in"):
        made: Any = torch.amp.GradScaler if way == "GradScaler" else lossscale.torch.GradScaler
        scaler = made("cpu", init_scale=SCALE)

        def with_scaler(loss: Any) -> None:
            scaled = scaler.scale(loss)
            if backward:
                scaled.backward()
            if clips:
                scaler.unscale_(inner)
                clip()
            scaler.step(inner)
            scaler.update()

        return inner, with_scaler
    settings: dict[str, Any] = {"clip_norm": CLIP if clips else None}
    if way == "fixed":
        settings["rule"] = lossscale.FixedScale(SCALE)
    if way == "device":
        settings["decide"] = "device"
    optimizer = lossscale.torch.LossScaleOptimizer(inner, **settings)

    def wrapped(loss: Any) -> None:
        scaled = optimizer.scale_loss(loss)
        if backward:
            scaled.backward()
        optimizer.step()

    return optimizer, wrapped


def methods(flag: str) -> list[str]:
    """Returns the ways that there are with an implementation of the optimizer."""
    return [name for name in METHODS if name != "device" or flag == "fused"]


def alone(flag: str, shape: str, quick: bool) -> dict[str, Alone]:
    """Returns the programs of a row of the optimizer alone."""
    number, size = SHAPES[shape]
    number, size = (3, (4,)) if quick else (number, size)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for _ in range(number)]
    gradients = [torch.randn(size) * 1e-3 for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return {name: Alone(name, parameters, gradients, FLAGS[flag]) for name in methods(flag)}


def whole(model_name: str, quick: bool) -> dict[str, Train]:
    """Returns the programs of a row of whole training steps."""
    torch.manual_seed(0)
    nn, width = torch.nn, 8 if quick else 512
    if model_name == "mlp":
        model: Any = nn.Sequential(
            nn.Linear(784, width),
            nn.ReLU(),
            *(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())),
            nn.Linear(width, 10),
        )
        x = torch.randn(128, 784)
    else:
        channels = 4 if quick else 32
        model = nn.Sequential(
            nn.Conv2d(3, channels, 3),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(channels * 16, 10),
        )
        x = torch.randn(32, 3, 24, 24)
    batch = x, torch.randint(0, 10, (len(x),))
    return {name: Train(name, model, batch) for name in methods("fused")}


def rows() -> dict[str, Callable[[bool], dict[str, Any]]]:
    """Returns what makes the programs of each row, by its name."""
    found: dict[str, Callable[[bool], dict[str, Any]]] = {}
    for flag in FLAGS:
        for shape in SHAPES:
            found[f"{flag}, {shape}"] = lambda quick, f=flag, s=shape: alone(f, s, quick)
    for model in ("mlp", "cnn"):
        found[f"whole step, {model}"] = lambda quick, m=model: whole(m, quick)
    return found


def measure(names: Sequence[str], rounds: int, quick: bool) -> dict[str, Any]:
    """Returns seconds of a step and ratios, by row and method; JSON-ready."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _measured(rows()[name](quick), rounds, quick) for name in names}
    finally:
        torch.set_num_threads(threads)


def _measured(programs: dict[str, Any], rounds: int, quick: bool) -> dict[str, Any]:
    for program in programs.values():
        for _ in range(1 if quick else 5):
            program.prepare()
            program.step()
    steps = 1 if quick else 4
    times = interleave(programs, rounds=rounds, steps=steps, clock=time.thread_time)
    return {
        name: {
            "seconds": as_numbers(quartiles(times[name])),
            "ratio": as_numbers(ratios(times[name], times[_baseline(name)])),
        }
        for name in programs
    }


def _baseline(name: str) -> str:
    return "bare, clip" if name.endswith(", clip") else "bare"


def table(results: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    compared = [name for name in METHODS if any(name in found for found in results.values())]
    compared = [name for name in compared if not name.startswith("bare")]
    lines = [
        "| AdamW | ms a step, bare | " + " | ".join(compared) + " |",
        "|---|---|" + "---|" * len(compared),
    ]
    for row, found in results.items():
        base = 1000 * found["bare"]["seconds"]["median"]
        cells = [
            f"{found[name]['ratio']['median']:.2f}" if name in found else "-" for name in compared
        ]
        lines.append(f"| {row} | {base:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(command_line: Sequence[str]) -> int:
    """Measures, and writes a JSON file and a table into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_native",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default=list(rows()), type=lambda text: text.split(";"))
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--quick", action="store_true", help="tiny; the times mean nothing")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args(command_line)
    unknown = set(options.rows) - set(rows())
    if unknown:
        parser.error(f"there is no row {unknown.pop()!r}; there are {'; '.join(rows())}")
    results = measure(options.rows, options.rounds, options.quick)
    print(table(results))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        before, rest = options.page.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        page = f"{before}{BEGIN}\n{table(results)}\n{END}{after}"
        options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

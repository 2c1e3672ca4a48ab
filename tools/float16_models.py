"""Times a float16 model with masters beside float32 parameters under autocast, with fused AdamW.

`python -m tools.float16_models` prints a table of whole training steps of a transformer, of 1 and
of 4 micro-batches: milliseconds of the first column, and the others as ratios to it. The steps of
all columns alternate. `tools.gpu` runs it; without a GPU, `--small` shows that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import lossscale
from benchmarks import tables

# For each column whether the model is float16, and what scales the loss.
WAYS = {
    "autocast, `torch.amp.GradScaler`": (False, "GradScaler"),
    "autocast, `backward`": (False, "backward"),
    "float16 model, `backward`": (True, "backward"),
    "float16 model, `scale_loss`": (True, "scale_loss"),
    'float16 model, `decide="device"`': (True, "device"),
    "float16 model, `torch.amp.GradScaler`": (True, "GradScaler"),
}


def step_of(way: str, device: str, batches: int, *, small: bool) -> Callable[[], None]:
    """Returns a training step.

    Args:
        way: One of `WAYS`.
        device: Type of the device.
        batches: Number of micro-batches.
        small: Whether the model and the batches are tiny.
    """
    half, scaling = WAYS[way]
    torch.manual_seed(0)
    width, shape, depth = (16, (2, 4), 1) if small else (512, (32, 128), 6)
    layers = [torch.nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0) for _ in range(depth)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 64)).to(device)
    inputs = torch.randn(*shape, width, device=device)
    labels = torch.randint(64, shape, device=device).flatten()
    if half:
        model.half()
        inputs = inputs.half()
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    if half:
        optimizer = lossscale.torch.MasterWeights(optimizer)
    scaler = torch.amp.GradScaler(device) if scaling == "GradScaler" else None
    if scaler is None:
        decide = "device" if scaling == "device" else "host"
        optimizer = lossscale.torch.LossScaleOptimizer(optimizer, decide=decide)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(batches):
            cast = contextlib.nullcontext() if half else torch.autocast(device, torch.float16)
            with cast:
                logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels) / batches
            if scaler is not None:
                scaler.scale(loss).backward()
            elif scaling == "backward":
                optimizer.backward(loss)
            else:
                optimizer.scale_loss(loss).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return step


def seconds_of(step: Callable[[], None], device: str) -> float:
    """Returns how long a step takes, the work on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def table(device: str, rounds: int, *, small: bool) -> str:
    """Returns the table in Markdown."""
    lines = []
    for batches in (1, 4):
        steps = [step_of(way, device, batches, small=small) for way in WAYS]
        for step in steps * 3:
            step()
        times = [[seconds_of(step, device) for step in steps] for _ in range(rounds)]
        first = 1e3 * statistics.median(each[0] for each in times)
        # Within a round, because clocks change from round to round.
        ratios = [statistics.median(each[n] / each[0] for each in times) for n in range(len(WAYS))]
        name = "1 micro-batch" if batches == 1 else f"{batches} micro-batches"
        lines.append([name, f"{first:.2f}", *(f"{ratio:.2f}" for ratio in ratios)])
    return tables.table(["transformer", "ms", *WAYS], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--small", action="store_true", help="a tiny model and batch")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        # On arrays as small as these, several threads wait for one another most of the time.
        torch.set_num_threads(1)
    print(table(options.device, options.rounds, small=options.small))


if __name__ == "__main__":
    main()

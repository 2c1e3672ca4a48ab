"""Trains handwritten digits in float32, under autocast, and as a float16 model in four ways.

`make demo` runs this program. It needs PyTorch 2.10, scikit-learn and matplotlib.

The model, the loss and the learning rate are ordinary, and nothing is made small on purpose. Each
run that fails does so by itself.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lossscale

BATCH = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The default growth interval of 2,000 steps is longer than the whole run.
RULE = lossscale.DynamicScale(growth_interval=20)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a run trains: its model, its optimizer and its loss scaling."""

    half: bool = False
    autocast: bool = False
    fused: bool = False
    masters: bool = False
    scaling: str = ""


RUNS = {
    "float32": Way(),
    "float16 autocast, LossScaleOptimizer": Way(autocast=True, scaling="lossscale"),
    "model.half(), AdamW alone": Way(half=True),
    "model.half(), torch.amp.GradScaler": Way(half=True, scaling="torch"),
    "model.half(), torch.amp.GradScaler, fused AdamW": Way(half=True, scaling="torch", fused=True),
    "model.half(), LossScaleOptimizer(MasterWeights(...))": Way(
        half=True, scaling="lossscale", masters=True
    ),
}


@dataclasses.dataclass
class Run:
    """A training run: (epochs done, accuracy) after each epoch, and the numbers of each step."""

    accuracy: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def ended(self):
        """Why it ended early, or an empty text."""
        if self.losses and not math.isfinite(self.losses[-1]):
            return f"NaN in step {len(self.losses)}"
        return self.error


def digits():
    """Returns images (float32, from 0 to 1) and labels: of 1437 to train on, of 360 to test on."""
    found = load_digits()
    images = (found.data / 16).astype(np.float32)
    parts = train_test_split(
        images, found.target, test_size=360, random_state=0, stratify=found.target
    )
    images, test_images, labels, test_labels = (torch.tensor(part).to(DEVICE) for part in parts)
    return images, labels, test_images, test_labels


def new_model():
    """Returns a classifier with float32 parameters, always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.LayerNorm(256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    ).to(DEVICE)


def make_step(way, model, run, **settings):
    """Returns a function that takes a loss and makes a step of the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=way.fused, **settings)
    if way.masters:
        optimizer = lossscale.torch.MasterWeights(optimizer)
    if way.scaling == "lossscale":
        optimizer = lossscale.LossScaleOptimizer(optimizer, rule=RULE)
    scaler = torch.amp.GradScaler(DEVICE) if way.scaling == "torch" else None

    def step(loss):
        optimizer.zero_grad()
        if way.scaling == "lossscale":
            run.scales.append(float(optimizer.loss_scale))
            optimizer.backward(loss)
            optimizer.step()
            if optimizer.last_step_skipped:
                run.skipped.append(len(run.losses))
        elif scaler:
            run.scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < run.scales[-1]:
                run.skipped.append(len(run.losses))
        else:
            loss.backward()
            optimizer.step()

    return step


def train(data, way, *, epochs, after_epoch=lambda run: None, **settings):
    """Trains one run until its loss is NaN, or the optimizer fails; returns what happened."""
    images, labels, test_images, test_labels = data
    model, run, shuffled = new_model(), Run(), np.random.default_rng(0)
    if way.half:
        model.half()
        images, test_images = images.half(), test_images.half()
    step = make_step(way, model, run, **settings)
    batches = len(images) // BATCH
    while len(run.losses) < epochs * batches and not run.ended:
        order = torch.tensor(shuffled.permutation(len(images))).to(DEVICE)
        for chosen in order.split(BATCH)[:batches]:
            with torch.autocast(DEVICE, torch.float16, enabled=way.autocast):
                logits = model(images[chosen])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[chosen])
            run.losses.append(loss.item())
            if run.ended:
                break
            try:
                step(loss)
            except ValueError as error:
                run.error = f"{type(error).__name__}: {error}"
                return run
        with torch.no_grad(), torch.autocast(DEVICE, torch.float16, enabled=way.autocast):
            right = model(test_images).argmax(1) == test_labels
        run.accuracy.append((len(run.losses) / batches, float(right.float().mean())))
        after_epoch(run)
    return run


def table(runs):
    """Returns a table in Markdown with a row for each run."""
    rows = [["", "test accuracy", "last loss", "steps skipped"]]
    for name, run in runs.items():
        accuracy = f"{run.accuracy[-1][1]:.1%}" if run.accuracy else "-"
        last = run.ended or f"{run.losses[-1]:.4f}"
        skipped = f"{len(run.skipped)} of {len(run.losses)}" if run.scales and not run.ended else ""
        rows.append([name, accuracy, last, skipped])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |" for row in rows
    )


def draw(runs, path):
    """Draws the accuracy by epoch, and the loss scale by step with a cross at each skip."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    accuracy, scales = figure.subplots(1, 2)
    looks = ("o-", "#000000"), ("s--", "#0072B2"), ("X", "#D55E00"), (" ", "#FFFFFF")
    looks += ("P", "#E69F00"), ("^-.", "#009E73")
    handles = []
    for (look, color), (name, run) in zip(looks, runs.items()):
        label = f"{name}: {run.ended}" if run.ended else name
        epochs, shares = zip(*run.accuracy) if run.accuracy else ((), ())
        size = 10 if run.ended else 6
        handles += accuracy.plot(epochs, shares, look, color=color, label=label, markersize=size)
        if run.scales and not run.ended:
            steps = range(1, len(run.scales) + 1)
            # Runs often have the same scale: the second line is drawn within the first.
            width = 2 if RUNS[name].half else 5
            scales.step(steps, run.scales, where="mid", color=color, linewidth=width)
            at = [run.scales[step - 1] for step in run.skipped]
            scales.plot(run.skipped, at, "x", color=color, markersize=10, markeredgewidth=2)
    accuracy.set(title="Test accuracy after each epoch", xlabel="epoch", ylim=(0, 1.03))
    accuracy.grid(alpha=0.3)
    scales.set(title="Loss scale of each step; a cross is a skipped step", xlabel="step")
    scales.set_yscale("log", base=2)
    scales.grid(alpha=0.3)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def progress(name, epochs):
    """Returns a function that shows the progress of a run: on a terminal in one line that moves."""
    terminal = sys.stdout.isatty()

    def show(run):
        done, accuracy = run.accuracy[-1]
        ends = bool(run.ended) or done == epochs
        if terminal or ends:
            bar = "#" * int(20 * done / epochs)
            line = f"{name:52} [{bar:20}] epoch {math.ceil(done)}/{epochs}, accuracy {accuracy:.1%}"
            print(f"\r{line}" if terminal else line, end="\n" if ends else "", flush=True)

    return show


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="of each run (default: 15)")
    parser.add_argument("--output", type=pathlib.Path, default="demo.png", help="the picture")
    arguments = parser.parse_args()
    # Before the training: what cannot be written fails at once.
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    # On arrays as small as these, several threads wait for one another most of the time.
    torch.set_num_threads(1)
    start, data, runs = time.perf_counter(), digits(), {}
    print(__doc__.partition("\n\n")[2].partition("\n\n")[2])
    for name, way in RUNS.items():
        show = progress(name, arguments.epochs)
        run = runs[name] = train(data, way, epochs=arguments.epochs, after_epoch=show)
        if run.ended:
            print(f"{name}: {run.ended}")
    draw(runs, arguments.output)
    print(f"\n{table(runs)}\n\nPicture: {arguments.output}")
    print(f"{time.perf_counter() - start:.0f} seconds on {DEVICE}")


if __name__ == "__main__":
    main()

"""Trains handwritten digits in float32, and in float16 without a loss scale and with one.

`make demo` runs this program. It needs PyTorch, scikit-learn and matplotlib.

The loss is averaged over 2**20 outputs, as a network averages over the pixels of a 1024 x 1024
image. Digits alone do not need that: it makes the gradients smaller than any float16 number. The
learning rate is multiplied by the same power of two, so that float32 training does not change.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
import time

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lossscale
from lossscale.monitoring import StepRecord

OUTPUTS = 2**20
BATCH = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# For each run, whether it computes in float16, and the rule of its loss scale.
RUNS = {
    "float32": (False, None),
    "float16, no scaling": (True, None),
    # The scale that undoes the average exactly.
    "float16, fixed scale": (True, lossscale.FixedScale(OUTPUTS)),
    # Too high on purpose, so that the first step overflows. The default growth interval of 2,000
    # steps is longer than the whole run.
    "float16, dynamic scale": (
        True,
        lossscale.DynamicScale(initial_scale=2.0**40, growth_interval=30),
    ),
}


@dataclasses.dataclass
class Run:
    """A training run: two shares after each epoch; with a loss scale, the record of each step."""

    accuracy: list[float] = dataclasses.field(default_factory=list)
    flushed: list[float] = dataclasses.field(default_factory=list)
    records: list[StepRecord] = dataclasses.field(default_factory=list)


def digits():
    """Returns images (float32, from 0 to 1) and labels: of 1437 to train on, of 360 to test on."""
    found = load_digits()
    images = (found.images / 16).astype(np.float32)
    parts = train_test_split(
        images, found.target, test_size=360, random_state=0, stratify=found.target
    )
    images, test_images, labels, test_labels = (torch.tensor(part).to(DEVICE) for part in parts)
    return images, labels, test_images, test_labels


def new_model():
    """Returns a classifier with float32 parameters, always the same."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers).to(DEVICE)


def loss_of(model, batch, float16=False, outputs=OUTPUTS):
    """Returns the cross-entropy of a batch, averaged over `outputs` outputs of each image."""
    images, labels = batch
    with torch.autocast(DEVICE, torch.float16) if float16 else contextlib.nullcontext():
        logits = model(images)
    return torch.nn.functional.cross_entropy(logits.float(), labels) / outputs


def train(data, float16, rule, *, epochs, outputs=OUTPUTS, after_epoch=lambda run: None):
    """Trains one run, and returns what happened."""
    images, labels, test_images, test_labels = data
    model, run, shuffled = new_model(), Run(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * outputs, momentum=0.9)
    if rule is not None:
        optimizer = lossscale.LossScaleOptimizer(optimizer, rule=rule)
        monitor = lossscale.torch.Monitor(optimizer, model)
    for _ in range(epochs):
        order = torch.tensor(shuffled.permutation(len(images))).to(DEVICE)
        for chosen in order.split(BATCH)[: len(images) // BATCH]:
            optimizer.zero_grad()
            loss = loss_of(model, (images[chosen], labels[chosen]), float16, outputs)
            if rule is None:
                loss.backward()
                optimizer.step()
                continue
            optimizer.backward(loss)  # multiplies the loss by the scale, divides the gradients
            optimizer.step()  # changes no parameter if a gradient is not finite
            monitor.step(loss)
            run.records.append(monitor.last_record)
        with torch.no_grad(), torch.autocast(DEVICE, torch.float16, enabled=float16):
            right = model(test_images).argmax(1) == test_labels
        run.accuracy.append(float(right.float().mean()))
        batch = images[:BATCH], labels[:BATCH]
        scale = run.records[-1].next_scale if run.records else 1.0
        run.flushed.append(share_flushed(model, batch, float16, scale, outputs))
        after_epoch(run)
    return run


def share_flushed(model, batch, float16, scale, outputs=OUTPUTS):
    """Returns the share of gradients that are not 0 in float32, and 0 in the run's precision."""
    reference = gradients(model, loss_of(model, batch, False, outputs)) != 0
    flushed = gradients(model, loss_of(model, batch, float16, outputs) * scale) == 0
    return float((reference & flushed).sum() / reference.sum())


def gradients(model, loss):
    """Returns the gradients of all parameters as one vector."""
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in found])


def table(runs):
    """Returns a table in Markdown with a row for each run."""
    rows = [["", "test accuracy", "gradients flushed to zero", "steps skipped", "final scale"]]
    for name, run in runs.items():
        skipped = scale = ""
        if run.records:
            skipped = f"{run.records[-1].steps_skipped} of {len(run.records)}"
            scale = f"2**{round(np.log2(run.records[-1].next_scale))}"
        shares = f"{run.accuracy[-1]:.1%}", f"{np.mean(run.flushed):.2%}"
        rows.append([name, *shares, skipped, scale])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |" for row in rows
    )


def draw_scale(records, ax, look, color, name):
    """Draws the loss scale of each step, and a cross where a step was skipped."""
    ax.plot([r.step for r in records], [r.scale for r in records], look, color=color, label=name)
    skipped = [r for r in records if r.skipped]
    ax.plot([r.step for r in skipped], [r.scale for r in skipped], "x", color=color)


def draw(runs, report, path):
    """Draws accuracy by epoch, loss scale by step, and the error of each gradient by loss scale."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplot_mosaic([["accuracy", "scales"], ["gradients", "gradients"]])
    looks = ("o-", "#000000"), ("X:", "#D55E00"), ("s--", "#0072B2"), ("^-.", "#009E73")
    for (look, color), (name, run) in zip(looks, runs.items()):
        epochs = range(1, len(run.accuracy) + 1)
        axes["accuracy"].plot(epochs, run.accuracy, look, color=color, label=name)
        if run.records:
            draw_scale(run.records, axes["scales"], look[1:], color, name)
    axes["accuracy"].set(title="Test accuracy after each epoch", xlabel="epoch", ylim=(0, 1))
    axes["accuracy"].grid(alpha=0.3)
    axes["accuracy"].legend()
    axes["scales"].set_title("Loss scale of each step")
    axes["scales"].set_yscale("log", base=2)
    axes["scales"].legend()
    for gradient in report.measurement.gradients:
        axes["gradients"].loglog(
            [2.0**exponent for exponent in gradient.errors],
            [max(error, 1e-5) for error in gradient.errors.values()],
            label=gradient.name,
            base=2,
        )
    axes["gradients"].set(title="Error of each gradient in float16", xlabel="loss scale")
    axes["gradients"].legend(fontsize="small")
    figure.suptitle(
        "Handwritten digits. The loss is averaged over $2^{20}$ outputs on purpose, as over the "
        "pixels of a 1024 x 1024 image:\nwithout a loss scale, float16 gradients become zero."
    )
    figure.savefig(path, dpi=120)


def progress(name, epochs):
    """Returns a function that shows the progress of a run: on a terminal in one line that moves."""
    terminal = sys.stdout.isatty()

    def show(run):
        done = len(run.accuracy)
        if terminal or done == epochs:
            bar = "#" * (20 * done // epochs)
            line = f"{name:22} [{bar:20}] epoch {done}/{epochs}, accuracy {run.accuracy[-1]:.1%}"
            print(f"\r{line}" if terminal else line, end="" if done < epochs else "\n", flush=True)

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
    for name, (float16, rule) in RUNS.items():
        show = progress(name, arguments.epochs)
        runs[name] = train(data, float16, rule, epochs=arguments.epochs, after_epoch=show)
    images, labels, *_ = data
    report = lossscale.torch.diagnose(new_model(), loss_of, [(images[:BATCH], labels[:BATCH])])
    draw(runs, report, arguments.output)
    print(f"\n{table(runs)}\n\nPicture: {arguments.output}")
    print(f"{time.perf_counter() - start:.0f} seconds on {DEVICE}")


if __name__ == "__main__":
    main()

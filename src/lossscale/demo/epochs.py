"""The course of a run, the same for every framework."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from lossscale.demo.experiment import BATCH, OUTPUTS, Digits, Probe, Recipe, Run


class Learner(Protocol):
    """A network that learns one way."""

    def step(self, images: Any, labels: Any) -> None:
        """Takes a training step on a batch."""

    def skipped(self) -> bool:
        """Whether the last step was skipped; asked for with loss scaling only."""

    def scale(self) -> float:
        """The loss scale of the next step; asked for with loss scaling only."""

    def accuracy(self, images: Any, labels: Any) -> float:
        """The share of images that it names rightly, from 0 to 1."""

    def weights(self) -> Any:
        """Its weights, as the probe of its framework takes them."""


def learn(
    learner_of: Callable[[Recipe, int, int], Learner],
    recipe: Recipe,
    digits: Digits,
    *,
    epochs: int,
    seed: int,
    outputs: int = OUTPUTS,
    probe: Probe | None = None,
    after_epoch: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Trains a network one way and notes what happens.

    Args:
        learner_of: Makes the network of a framework, from the way to train, the seed of its weights
            and `outputs`.
        recipe: The way to train.
        digits: The images. Those that do not fill the last batch of an epoch are left out of it.
        epochs: How often every image is seen.
        seed: Seed of the weights and of the order of the images.
        outputs: The number that the loss is divided by and the learning rate multiplied by. A
            power of two leaves a float32 run exactly as it was.
        probe: What measures the share of flushed gradients; by default it is not measured.
        after_epoch: Called after every epoch with the run so far.

    Returns:
        What happened.
    """
    import numpy as np

    started = time.perf_counter()
    learner = learner_of(recipe, seed, outputs)
    run = Run(recipe)
    shuffler = np.random.default_rng(seed)
    whole_batches = len(digits.images) // BATCH * BATCH
    scale = None if recipe.rule is None else float(recipe.rule.init().scale)
    for _ in range(epochs):
        order = shuffler.permutation(len(digits.images))[:whole_batches]
        for batch in order.reshape(-1, BATCH):
            learner.step(digits.images[batch], digits.labels[batch])
            if scale is not None:
                run.scales.append(scale)
                run.skipped.append(learner.skipped())
                scale = learner.scale()
        run.accuracy.append(learner.accuracy(digits.test_images, digits.test_labels))
        run.seconds += time.perf_counter() - started
        if probe is not None:
            is_half = recipe.policy != "float32"
            weights = learner.weights()
            run.flushed.append(probe.share_flushed(weights, scale or 1.0) if is_half else 0.0)
        run.final_scale = scale
        after_epoch(run)
        started = time.perf_counter()
    return run

"""What is compared: four ways to train on the digits, and what happened in each.

Needs no framework.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lossscale.diagnosis import passes
from lossscale.diagnosis.report import Report, report_on
from lossscale.rules import DynamicScale, FixedScale, ScaleRule

OUTPUTS = 2**20
"""How many outputs the loss is averaged over: the pixels of a 1024 x 1024 image. The gradient by a
logit is then at most 1 / (BATCH * OUTPUTS) = 2**-26, and float16 flushes it to zero."""

BATCH = 64
"""Images per step. 64 * OUTPUTS outputs make one loss."""

HIDDEN_UNITS = 32
"""Few, and in a dense layer. Without fast kernels each float16 product takes some 10 ns: so it was
measured with TensorFlow and oneDNN, where a convolution takes 40 times as long as in float32."""

SIZES = ((64, HIDDEN_UNITS), (HIDDEN_UNITS, 10))
"""Inputs and outputs of the two dense layers."""

LEARNING_RATE = 0.05
"""For a loss that is averaged over the images alone. The runs multiply it by the outputs."""

MOMENTUM = 0.9


class Recipe(NamedTuple):
    """One of the ways to train.

    Attributes:
        name: What it is called in the table and in the picture.
        policy: The Keras dtype policy of the model, or what computes the same without Keras.
        rule: The rule of the loss scale, or None for no loss scaling.
    """

    name: str
    policy: str
    rule: ScaleRule | None


FIXED = FixedScale(OUTPUTS)
"""The scale that undoes the division by the outputs, exactly."""

DYNAMIC = DynamicScale(initial_scale=2.0**40, growth_interval=30)
"""Too high to begin with, and an interval far below the usual 2000 steps: so a run of some hundred
steps shows the scale being lowered, and raised until the gradients overflow."""

RECIPES = (
    Recipe("float32", "float32", None),
    Recipe("float16, no scaling", "mixed_float16", None),
    Recipe("float16, fixed", "mixed_float16", FIXED),
    Recipe("float16, dynamic", "mixed_float16", DYNAMIC),
)


@dataclasses.dataclass
class Run:
    """What happened while training one way.

    Attributes:
        recipe: The way to train.
        accuracy: Test accuracy after each epoch, a share from 0 to 1.
        flushed: Share of gradients flushed to zero after each epoch, from 0 to 1.
        scales: The loss scale that each step was taken with; empty without loss scaling.
        skipped: Whether each step was skipped; empty without loss scaling.
        final_scale: The loss scale after the last step, or None without loss scaling.
        seconds: Time to build the model, to train it and to test it after each epoch.
    """

    recipe: Recipe
    accuracy: list[float] = dataclasses.field(default_factory=list)
    flushed: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    final_scale: float | None = None
    seconds: float = 0.0


def first_weights(seed: int) -> list[Any]:
    """Returns what the runs without Keras start from, as Keras would draw it.

    Args:
        seed: Seed of the matrices.

    Returns:
        A matrix and a bias for each layer, float32 arrays.

    Source: X. Glorot and Y. Bengio, Understanding the difficulty of training deep feedforward
    neural networks, 2010.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    weights: list[Any] = []
    for inputs, outputs in SIZES:
        limit = math.sqrt(6 / (inputs + outputs))
        matrix = random.uniform(-limit, limit, (inputs, outputs))
        weights += [matrix.astype(np.float32), np.zeros(outputs, np.float32)]
    return weights


TEST_IMAGES = 360


class Digits(NamedTuple):
    """Images of digits and what they show.

    Attributes:
        images: float32 array of shape (n, 8, 8), from 0 to 1; n is 1437.
        labels: int64 array of shape (n,), from 0 to 9.
        test_images: The same for the 360 images that are not trained on.
        test_labels: Their labels.
    """

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any


def load_digits(seed: int) -> Digits:
    """Returns the 1,797 digits that come with scikit-learn, a fifth of them for testing.

    Args:
        seed: Which images are tested on.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    images = (data.images / 16).astype("float32")
    trained, tested, labels, test_labels = train_test_split(
        images, data.target, test_size=TEST_IMAGES, random_state=seed, stratify=data.target
    )
    return Digits(trained, labels, tested, test_labels)


class Probe(NamedTuple):
    """A model to look at, which is not trained.

    Attributes:
        load: Gives it weights, as the learner of its framework returns them.
        run: Computes its gradients.
        batch: What it is measured on.
        setting: What it computes with, in words.
    """

    load: Callable[[Any], None]
    run: passes.Run
    batch: Any
    setting: str

    def gradients(self, weights: Any, scale: float = 1.0, *, half: bool = False) -> Any:
        """Returns every gradient of the scaled loss, a float32 array of shape (weights,).

        Args:
            weights: The weights.
            scale: What the loss is multiplied by, in float32.
            half: Whether to compute in float16.
        """
        import numpy as np

        self.load(weights)
        found = self.run(self.batch, scale, half)[passes.LOSS].gradients
        return np.concatenate([gradient.ravel() for gradient in found.values()])

    def share_flushed(self, weights: Any, scale: float) -> float:
        """Returns the share of gradients that are not zero in float32, but zero in float16.

        So it also counts where not the gradient itself is too small for float16, but one that it
        is computed from.

        Args:
            weights: The weights.
            scale: The loss scale in float16.
        """
        counted = self.gradients(weights) != 0
        flushed = counted & (self.gradients(weights, scale, half=True) == 0)
        return float(flushed.sum() / max(counted.sum(), 1))

    def report(self, weights: Any) -> Report:
        """Returns the diagnosis of the model with these weights."""
        self.load(weights)
        return report_on(self.run, [self.batch], model="digits", setting=self.setting)

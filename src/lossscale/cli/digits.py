"""The experiment of the demo: handwritten digits, learned in float32 and in float16."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lossscale import DynamicScale, FixedScale, LossScaleOptimizer, ScaleRule
from lossscale.cli.probe import GradientProbe

OUTPUTS = 2**20
"""How many outputs the loss is averaged over: the pixels of a 1024 x 1024 image."""

BATCH = 64
"""Images per step. 64 * OUTPUTS outputs make one loss."""

LEARNING_RATE = 0.05
"""For a loss that is averaged over the images alone. The runs multiply it by the outputs."""

TEST_IMAGES = 360


class Recipe(NamedTuple):
    """One of the ways to train.

    Attributes:
        name: What it is called in the table and in the picture.
        policy: The Keras dtype policy of the model.
        rule: The rule of the loss scale, or None for no loss scaling.
    """

    name: str
    policy: str
    rule: ScaleRule | None


RECIPES = (
    Recipe("float32", "float32", None),
    Recipe("float16, no scaling", "mixed_float16", None),
    # The scale that undoes the division by the outputs, exactly.
    Recipe("float16, fixed", "mixed_float16", FixedScale(OUTPUTS)),
    # Too high to begin with, and an interval far below the usual 2000 steps: so a run of some
    # hundred steps shows the scale being lowered, and raised until the gradients overflow.
    Recipe(
        "float16, dynamic",
        "mixed_float16",
        DynamicScale(initial_scale=2.0**40, growth_interval=30),
    ),
)


class Digits(NamedTuple):
    """Images of digits and what they show.

    Attributes:
        images: float32 array of shape (n, 8, 8, 1), from 0 to 1; n is 1437.
        labels: int64 array of shape (n,), from 0 to 9.
        test_images: The same for the 360 images that are not trained on.
        test_labels: Their labels.
    """

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any


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


def load_digits(seed: int) -> Digits:
    """Returns the 1,797 digits that come with scikit-learn, a fifth of them for testing.

    Args:
        seed: Which images are tested on.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    images = (data.images / 16).astype("float32")[..., None]
    trained, tested, labels, test_labels = train_test_split(
        images, data.target, test_size=TEST_IMAGES, random_state=seed, stratify=data.target
    )
    return Digits(trained, labels, tested, test_labels)


def build_model(policy: str, seed: int) -> Any:
    """Returns a small convolutional classifier, not compiled.

    The same seed gives the same weights, whatever the policy.

    Args:
        policy: The Keras dtype policy of the model. The softmax is float32, as Keras advises;
            its gradient enters the float16 part where the logits are.
        seed: Seed of the weights.
    """
    import keras
    from keras import layers

    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, activation="relu"),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
                layers.Activation("softmax", dtype="float32"),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)


def averaged_loss(outputs: int) -> Callable[[Any, Any], Any]:
    """Returns the cross-entropy, divided by a number of outputs.

    Keras averages it over the images of a batch. A network that predicts something for every
    pixel divides by their number as well; here each image counts for all of them.
    """
    import keras

    def loss(labels: Any, predictions: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(labels, predictions) / outputs

    return loss


def make_probe(digits: Digits, seed: int, outputs: int = OUTPUTS) -> GradientProbe:
    """Returns what measures gradients: on the first images, for any weights and scale."""
    return GradientProbe(
        lambda policy: build_model(policy, seed),
        averaged_loss(outputs),
        digits.images[:BATCH],
        digits.labels[:BATCH],
    )


def train(
    recipe: Recipe,
    digits: Digits,
    *,
    epochs: int,
    seed: int,
    outputs: int = OUTPUTS,
    probe: GradientProbe | None = None,
    after_epoch: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Trains one way.

    Args:
        recipe: The way to train.
        digits: The images.
        epochs: How often every image is seen.
        seed: Seed of the weights and of the order of the images. The images that do not fill
            the last batch of an epoch are left out of it.
        outputs: The number that the loss is divided by and the learning rate multiplied by. A
            power of two leaves a float32 run exactly as it was.
        probe: What measures the share of flushed gradients; by default it is not measured.
        after_epoch: Called after every epoch with the run so far.

    Returns:
        What happened.
    """
    import keras
    import numpy as np

    run = Run(recipe)
    started = time.perf_counter()
    model = build_model(recipe.policy, seed)
    optimizer: Any = keras.optimizers.SGD(LEARNING_RATE * outputs, momentum=0.9)
    if recipe.rule is not None:
        optimizer = LossScaleOptimizer(optimizer, rule=recipe.rule)
    model.compile(
        optimizer,
        averaged_loss(outputs),
        metrics=["accuracy"],
        # Else Keras adds loss scaling of its own where the run is to have none.
        auto_scale_loss=recipe.rule is not None,
    )
    shuffler = np.random.default_rng(seed)
    whole_batches = len(digits.images) // BATCH * BATCH
    scale = None if recipe.rule is None else float(recipe.rule.init().scale)
    for _ in range(epochs):
        order = shuffler.permutation(len(digits.images))[:whole_batches]
        for batch in order.reshape(-1, BATCH):
            model.train_on_batch(digits.images[batch], digits.labels[batch])
            if scale is not None:
                run.scales.append(scale)
                run.skipped.append(bool(_to_number(optimizer.last_step_skipped)))
                scale = _to_number(optimizer.loss_scale)
        metrics = model.evaluate(
            digits.test_images,
            digits.test_labels,
            batch_size=TEST_IMAGES,
            verbose=0,
            return_dict=True,
        )
        run.accuracy.append(float(metrics["accuracy"]))
        run.seconds += time.perf_counter() - started
        if probe is not None:
            run.flushed.append(
                probe.share_flushed(recipe.policy, model.get_weights(), scale or 1.0)
            )
        run.final_scale = scale
        after_epoch(run)
        started = time.perf_counter()
    return run


def _to_number(scalar: Any) -> float:
    import keras

    return float(keras.ops.convert_to_numpy(scalar))

"""The training of the demo, with Keras: the same network and images, one way after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale.demo.epochs import learn
from lossscale.demo.experiment import (
    BATCH,
    HIDDEN_UNITS,
    LEARNING_RATE,
    MOMENTUM,
    OUTPUTS,
    Digits,
    Probe,
    Recipe,
    Run,
)
from lossscale.optimizer import LossScaleOptimizer


def build_model(policy: str, seed: int) -> Any:
    """Returns a small classifier, not compiled.

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
                keras.Input((8, 8)),
                layers.Flatten(),
                layers.Dense(HIDDEN_UNITS, activation="relu"),
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


def first_weights(seed: int) -> Any:
    """Returns the weights that every run of a seed starts from, as the probe takes them."""
    return build_model("float32", seed).get_weights()


def make_probe(digits: Digits, seed: int, outputs: int = OUTPUTS) -> Probe:
    """Returns what measures gradients: on the first images, for any weights and scale."""
    from lossscale.keras.passes import new_run

    model = build_model("mixed_float16", seed)
    model.compile(loss=averaged_loss(outputs))
    run = new_run(model)
    return Probe(
        model.set_weights, run, (digits.images[:BATCH], digits.labels[:BATCH]), run.setting
    )


def train(recipe: Recipe, digits: Digits, *, epochs: int, seed: int, **settings: Any) -> Run:
    """Trains one way; the arguments are those of `lossscale.demo.epochs.learn`."""
    return learn(_KerasLearner, recipe, digits, epochs=epochs, seed=seed, **settings)


class _KerasLearner:
    def __init__(self, recipe: Recipe, seed: int, outputs: int) -> None:
        import keras

        optimizer: Any = keras.optimizers.SGD(LEARNING_RATE * outputs, momentum=MOMENTUM)
        if recipe.rule is not None:
            optimizer = LossScaleOptimizer(optimizer, rule=recipe.rule)
        self._optimizer = optimizer
        self._model = build_model(recipe.policy, seed)
        self._model.compile(
            optimizer,
            averaged_loss(outputs),
            metrics=["accuracy"],
            # Else Keras adds loss scaling of its own where the run is to have none.
            auto_scale_loss=recipe.rule is not None,
        )

    def step(self, images: Any, labels: Any) -> None:
        self._model.train_on_batch(images, labels)

    def skipped(self) -> bool:
        return bool(_to_number(self._optimizer.last_step_skipped))

    def scale(self) -> float:
        return _to_number(self._optimizer.loss_scale)

    def accuracy(self, images: Any, labels: Any) -> float:
        metrics = self._model.evaluate(
            images, labels, batch_size=len(images), verbose=0, return_dict=True
        )
        return float(metrics["accuracy"])

    def weights(self) -> Any:
        return self._model.get_weights()


def _to_number(scalar: Any) -> float:
    import keras

    return float(keras.ops.convert_to_numpy(scalar))

"""The training of the demo, with PyTorch alone: autocast, and the wrapped optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from lossscale.demo.epochs import learn
from lossscale.demo.experiment import (
    BATCH,
    LEARNING_RATE,
    MOMENTUM,
    OUTPUTS,
    SIZES,
    Digits,
    Probe,
    Recipe,
    Run,
)
from lossscale.demo.experiment import first_weights as first_weights
from lossscale.optimizer import LossScaleOptimizer


def build_model(weights: Sequence[Any]) -> Any:
    """Returns a small classifier whose parameters are float32.

    Args:
        weights: A matrix and a bias for each layer, as `first_weights` returns them.
    """
    import torch

    (inputs, hidden), (_, outputs) = SIZES
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(inputs, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, outputs),
    )
    _load(model, weights)
    return model


def _load(model: Any, weights: Sequence[Any]) -> None:
    import torch

    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(_turned(weight)))


def _turned(weight: Any) -> Any:
    # PyTorch's matrices have outputs first.
    return weight.transpose() if weight.ndim == 2 else weight


def loss_of(model: Any, images: Any, labels: Any, policy: str, outputs: int) -> Any:
    """Returns the cross-entropy of a batch, divided by a number of outputs.

    Args:
        model: What `build_model` returns.
        images: float32 tensor of shape (n, 8, 8).
        labels: int64 tensor of shape (n,).
        policy: "float32" or "mixed_float16".
        outputs: The number.
    """
    import torch

    in_float16: Any = contextlib.nullcontext()
    if policy != "float32":
        in_float16 = torch.autocast("cpu", torch.float16)
    with in_float16:
        logits = model(images)
    return torch.nn.functional.cross_entropy(logits.float(), labels) / outputs


def make_probe(digits: Digits, seed: int, outputs: int = OUTPUTS) -> Probe:
    """Returns what measures gradients: on the first images, for any weights and scale."""
    import torch

    from lossscale.torch.passes import new_run

    model = build_model(first_weights(seed))
    batch = torch.tensor(digits.images[:BATCH]), torch.tensor(digits.labels[:BATCH])

    def loss_fn(model: Any, batch: Any) -> Any:
        # The diagnosis casts from outside.
        images, labels = batch
        return loss_of(model, images, labels, "float32", outputs)

    run = new_run(model, loss_fn)
    return Probe(lambda weights: _load(model, weights), run, batch, run.setting)


def train(recipe: Recipe, digits: Digits, *, epochs: int, seed: int, **settings: Any) -> Run:
    """Trains one way; the arguments are those of `lossscale.demo.epochs.learn`."""
    # What PyTorch imports for the first optimizer is no part of the training.
    _TorchLearner(recipe, seed, OUTPUTS)
    return learn(_TorchLearner, recipe, digits, epochs=epochs, seed=seed, **settings)


class _TorchLearner:
    def __init__(self, recipe: Recipe, seed: int, outputs: int) -> None:
        import torch

        self._recipe, self._outputs = recipe, outputs
        self._model = build_model(first_weights(seed))
        self._optimizer: Any = torch.optim.SGD(
            self._model.parameters(), LEARNING_RATE * outputs, momentum=MOMENTUM
        )
        if recipe.rule is not None:
            self._optimizer = LossScaleOptimizer(self._optimizer, rule=recipe.rule)

    def step(self, images: Any, labels: Any) -> None:
        import torch

        given = torch.tensor(images), torch.tensor(labels)
        loss = loss_of(self._model, *given, self._recipe.policy, self._outputs)
        if self._recipe.rule is not None:
            loss = self._optimizer.scale_loss(loss)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def skipped(self) -> bool:
        return bool(self._optimizer.last_step_skipped)

    def scale(self) -> float:
        return float(self._optimizer.loss_scale)

    def accuracy(self, images: Any, labels: Any) -> float:
        import torch

        with torch.no_grad(), torch.autocast("cpu", torch.float16, self._in_float16):
            named = self._model(torch.tensor(images)).argmax(1)
        return float((named == torch.tensor(labels)).float().mean())

    @property
    def _in_float16(self) -> bool:
        return self._recipe.policy != "float32"

    def weights(self) -> Any:
        return [
            _turned(parameter.detach().numpy()).copy() for parameter in self._model.parameters()
        ]

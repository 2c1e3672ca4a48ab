"""The training of the demo, with JAX and Optax alone: the wrapped transformation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lossscale.demo.epochs import learn
from lossscale.demo.experiment import (
    BATCH,
    LEARNING_RATE,
    MOMENTUM,
    OUTPUTS,
    Digits,
    Probe,
    Recipe,
    Run,
)
from lossscale.demo.experiment import first_weights as first_weights


def logits_of(weights: Sequence[Any], images: Any, policy: str) -> Any:
    """Returns what a small classifier says of images, float32 of shape (n, 10).

    Args:
        weights: A matrix and a bias for each layer, as `first_weights` returns them.
        images: float32 array of shape (n, 8, 8).
        policy: "float32", or "mixed_float16": then the layers compute in float16.
    """
    import jax
    import jax.numpy as jnp

    dtype = jnp.float32 if policy == "float32" else jnp.float16
    first, first_bias, second, second_bias = (jnp.asarray(w, dtype) for w in weights)
    values = jnp.asarray(images, dtype).reshape(len(images), -1)
    values = jax.nn.relu(values @ first + first_bias)
    return (values @ second + second_bias).astype(jnp.float32)


def loss_of(weights: Any, images: Any, labels: Any, policy: str, outputs: int) -> Any:
    """Returns the cross-entropy of a batch, divided by a number of outputs."""
    import optax

    logits = logits_of(weights, images, policy)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() / outputs


def make_probe(digits: Digits, seed: int, outputs: int = OUTPUTS) -> Probe:
    """Returns what measures gradients: on the first images, for any weights and scale."""
    import jax.numpy as jnp

    from lossscale.optax.passes import new_run

    def loss_fn(weights: Any, batch: Any, dtype: Any) -> Any:
        images, labels = batch
        policy = "float32" if dtype == jnp.float32 else "mixed_float16"
        return loss_of(weights, images, labels, policy, outputs)

    run = new_run(first_weights(seed), loss_fn)

    def load(weights: Any) -> None:
        run.params = weights

    return Probe(load, run, (digits.images[:BATCH], digits.labels[:BATCH]), run.setting)


def train(recipe: Recipe, digits: Digits, *, epochs: int, seed: int, **settings: Any) -> Run:
    """Trains one way; the arguments are those of `lossscale.demo.epochs.learn`."""
    return learn(_OptaxLearner, recipe, digits, epochs=epochs, seed=seed, **settings)


class _OptaxLearner:
    def __init__(self, recipe: Recipe, seed: int, outputs: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        self._policy = recipe.policy
        self._weights = [jnp.asarray(weight) for weight in first_weights(seed)]
        inner = optax.sgd(LEARNING_RATE * outputs, momentum=MOMENTUM)
        tx = inner if recipe.rule is None else _loss_scaled(inner, recipe.rule)
        self._state = tx.init(self._weights)

        def loss(weights: Any, images: Any, labels: Any) -> Any:
            return loss_of(weights, images, labels, recipe.policy, outputs)

        def step(weights: Any, state: Any, images: Any, labels: Any) -> Any:
            if recipe.rule is None:
                gradients = jax.grad(loss)(weights, images, labels)
            else:
                _, gradients = _value_and_grad(loss)(state, weights, images, labels)
            updates, state = tx.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def step(self, images: Any, labels: Any) -> None:
        self._weights, self._state = self._step(self._weights, self._state, images, labels)

    def skipped(self) -> bool:
        return not bool(self._state.last_step_finite)

    def scale(self) -> float:
        return float(self._state.loss_scale)

    def accuracy(self, images: Any, labels: Any) -> float:
        import numpy as np

        named = np.asarray(logits_of(self._weights, images, self._policy)).argmax(1)
        return float((named == labels).mean())

    def weights(self) -> Any:
        return self._weights


def _loss_scaled(inner: Any, rule: Any) -> Any:
    import lossscale.optax

    return lossscale.optax.loss_scaled(inner, rule=rule)


def _value_and_grad(loss: Callable[..., Any]) -> Any:
    import lossscale.optax

    return lossscale.optax.value_and_grad(loss)

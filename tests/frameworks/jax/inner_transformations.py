"""Transformations for each kind of state; tests/conformance/every_optimizer.py finds the others."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

MASK = {"w": True, "b": False}
LABELS = {"w": "matrix", "b": "vector"}


def groups():
    return {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1, momentum=0.9)}


def sam():
    """Alternates between the step of an adversary and a step of its own."""
    normalized = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.adam(0.1), normalized, sync_period=2)


INNER = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw_clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), MASK),
    "multi_transform": lambda: optax.multi_transform(groups(), LABELS),
    "freezing": lambda: optax.partition(
        {"matrix": optax.adam(0.1), "vector": optax.set_to_zero()}, LABELS
    ),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.adam(0.1), lambda step: step % 2 == 0
    ),
    "adaptive_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(0.1)),
    "plateau": lambda: optax.chain(optax.adam(0.1), contrib.reduce_on_plateau(patience=1)),
    "polyak": lambda: optax.polyak_sgd(0.1),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(0.1), 0.1),
    "muon": lambda: contrib.muon(0.1, ns_steps=2),
    "prodigy": lambda: contrib.prodigy(0.1),
    "mechanize": lambda: contrib.mechanize(optax.adam(0.1)),
    "cocob": lambda: contrib.cocob(0.1),
    "sam": sam,
}
"""Transformations by name; each call makes a new one."""

VALUES_OF_THE_LOSS = {"plateau", "polyak"}
"""Those whose `update` needs `value=`."""


def params():
    """New parameters, with a -0.0 in them, which adding +0.0 would lose."""
    return {
        "w": jnp.arange(1.0, 13.0, dtype=jnp.float32).reshape(3, 4) / 8,
        "b": jnp.array([0.5, -0.0, -1.0, 2.0], jnp.float32),
    }


def gradients():
    return {
        "w": jnp.linspace(-1.0, 2.0, 12, dtype=jnp.float32).reshape(3, 4),
        "b": jnp.array([1.0, -0.5, 0.25, 3.0], jnp.float32),
    }


def extra_args(name, loss):
    return {"value": loss} if name in VALUES_OF_THE_LOSS else {}

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


def of_all_kinds():
    """Keeps what is shared, passed on, a constant, random, of nested calls, branches and loops."""

    def flipped(x, y):
        z = -x
        return z, x, z, jax.lax.cond(y.sum() > 9.0, lambda: z, lambda: y)

    def update(updates, state, params=None):
        x, y = updates["b"], state["y"]
        z = jax.jit(lambda a: jax.jit(jnp.sin)(a) + y)(x)
        key, other = jax.random.split(state["key"])
        plain = (lambda x, y: (x, x, y, y), flipped)
        of_branch = jax.lax.switch(jnp.int32(x.sum() < 0), plain, x, y)
        doubled = jax.lax.fori_loop(0, 3, lambda _, a: a * 2.0, y)
        chosen = jax.lax.cond(x.sum() > 0, lambda: x, lambda: y)
        kept = (z, z, z * 3.0, x, jnp.float32(1.0), *of_branch, doubled, chosen)
        y = y + jax.nn.relu(chosen) + jax.random.normal(other, y.shape) + kept[-3]
        return updates, {"y": y, "key": key, "kept": kept}

    def init(params):
        y = jnp.ones_like(params["b"])
        kept = (y, y, y, y, jnp.float32(0.0), *[y] * 6)
        return {"y": y, "key": jax.random.key(3), "kept": jax.tree.map(jnp.copy, kept)}

    return optax.GradientTransformation(init, update)


INNER = {
    "of all kinds": of_all_kinds,
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

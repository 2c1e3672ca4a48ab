"""float16 parameters with float32 copies train as float32 parameters that a loop rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale.optax
from frameworks.jax import inner_transformations as inner
from frameworks.jax.support import bits, signature
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError
from lossscale.optax import MasterWeightsState, loss_scaled, master_weights

INNER = {
    **inner.INNER,
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.01),
    "lion": lambda: optax.lion(0.01),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 6)),
    "accumulated, clipped": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)), 3
    ),
}
SCALE = 2.0**10


def rounded(masters, dtypes):
    return {name: jnp.asarray(leaf, dtypes[name]) for name, leaf in masters.items()}


def loss_fn(params, x, factor):
    hidden = jnp.tanh(x @ params["w"].astype(jnp.float16) + params["b"].astype(jnp.float16))
    return jnp.mean(hidden.astype(jnp.float32) ** 2) * factor


@jax.jit
def scaled_gradients(params, x, factor, scale):
    loss, gradients = jax.value_and_grad(lambda p: loss_fn(p, x, factor) * scale)(params)
    return loss / scale, gradients


def by_hand(name, dtypes, program, compiled):
    """Yields parameters and copies of a loop around Optax alone, with parameters in float32."""
    tx, masters, scale = INNER[name](), inner.params(), SCALE
    masters = {n: jnp.float32(leaf) for n, leaf in rounded(masters, dtypes).items()}
    state = tx.init(masters)

    def step(masters, state, gradients, loss):
        updates, state = tx.update(gradients, state, masters, **inner.extra_args(name, loss))
        return optax.apply_updates(masters, updates), state

    step = jax.jit(step) if compiled else step
    for x, factor, written in program:
        for n, (where, values) in written.items():
            now = rounded(masters, dtypes)[n]
            given = jnp.where(where, jnp.asarray(values, now.dtype), now)
            masters[n] = jnp.where(given == now, masters[n], given.astype(np.float32))
        loss, gradients = scaled_gradients(rounded(masters, dtypes), x, factor, scale)
        gradients = {n: leaf.astype(jnp.float32) / scale for n, leaf in gradients.items()}
        finite = all(np.isfinite(leaf).all() for leaf in gradients.values())
        if finite:
            masters, state = step(masters, state, gradients, loss)
        scale = scale if finite else max(scale / 2, 1.0)
        yield rounded(masters, dtypes), dict(masters) if finite else {}


def by_masters(name, dtypes, program, compiled):
    """Yields parameters and copies of `loss_scaled(master_weights(...))`."""
    tx = loss_scaled(master_weights(INNER[name]()), initial_scale=SCALE)
    params = rounded(inner.params(), dtypes)
    state = tx.init(params)

    def step(params, state, gradients, loss):
        updates, state = tx.update(gradients, state, params, **inner.extra_args(name, loss))
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    for x, factor, written in program:
        for n, (where, values) in written.items():
            params[n] = jnp.where(where, jnp.asarray(values, dtypes[n]), params[n])
        loss, gradients = scaled_gradients(params, x, factor, state.loss_scale)
        params, state = step(params, state, gradients, loss)
        copies = state.inner_state.masters
        masters = {n: params[n] if dtypes[n] == "float32" else copies[n] for n in params}
        # What was written before a skipped step replaces the copies at the next applied one.
        yield params, {} if state.last_step_skipped else masters


def random_program(seed):
    """A transformation, dtypes, steps (data, a factor of the loss, written values), compiled."""
    random = np.random.default_rng(seed)
    name = list(INNER)[seed % len(INNER)]
    dtypes = {
        n: str(random.choice(["float16", "float16", "bfloat16", "float32"])) for n in inner.params()
    }
    steps = []
    for _ in range(8):
        factor = random.choice([1.0, 1.0, 1.0, 30.0, 1e-3, np.inf, np.nan])
        written = {}
        if random.random() < 0.3:
            n = str(random.choice(["w", "b"]))
            shape = inner.params()[n].shape
            written[n] = random.random(shape) < 0.4, random.normal(size=shape)
        steps.append((random.normal(size=(5, 3)).astype(np.float16), np.float32(factor), written))
    return name, dtypes, steps, bool(random.random() < 0.5)


def difference(seed):
    """The largest difference of parameters and copies, in units of float32's spacing; 0 if none."""
    name, dtypes, program, compiled = random_program(seed)
    most = 0.0
    runs = by_hand(name, dtypes, program, compiled), by_masters(name, dtypes, program, compiled)
    for expected, found in zip(*runs, strict=True):
        assert {n: leaf.dtype.name for n, leaf in found[0].items()} == dtypes
        for of_hand, ours in zip(expected, found, strict=True):
            assert of_hand.keys() == ours.keys()
            for n, leaf in of_hand.items():
                a, b = np.float64(leaf), np.float64(ours[n])
                assert np.array_equal(np.isfinite(a), np.isfinite(b))
                apart = np.abs(a - b) / np.spacing(np.float32(np.abs(a).max()))
                most = max(most, float(np.nan_to_num(apart).max()))
    return most

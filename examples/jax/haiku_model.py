"""Trains a Haiku model in float16. The second batch overflows."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import lossscale
import lossscale.optax

rule = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
tx = lossscale.optax.loss_scaled(optax.adam(0.01), rule=rule)


@hk.without_apply_rng
@hk.transform
def net(x):
    return hk.Linear(1)(jax.nn.relu(hk.Linear(8)(x)))


def loss_fn(params, x, y):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    prediction = net.apply(half, x.astype(jnp.float16))
    return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x, y):
    loss, grads = lossscale.optax.value_and_grad(loss_fn)(opt_state, params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


x, y = jnp.ones((2, 4)), jnp.zeros((2, 1))
params = net.init(jax.random.key(0), x)
opt_state = tx.init(params)

trace = []
for batch in (x, x * 2**13, x, x):
    params, opt_state, loss = train_step(params, opt_state, batch, y)
    trace.append(float(lossscale.optax.loss_scale(opt_state)))
    print(f"loss {float(loss):.5g}, next scale {trace[-1]:g}")
print(*(f"{scale:g}" for scale in trace), "- steps skipped:", int(opt_state.steps_skipped))

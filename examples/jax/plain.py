"""Trains in float16 with JAX alone. The second batch overflows, and that step changes nothing."""

import functools

import jax
import jax.numpy as jnp
import optax

import lossscale
import lossscale.optax

rule = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
tx = lossscale.optax.loss_scaled(optax.adam(0.01), rule=rule)


def loss_fn(params, x, y):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    prediction = x.astype(jnp.float16) @ half["kernel"] + half["bias"]
    # float32 from here on: a mean over float16 numbers can overflow.
    return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x, y):
    loss, grads = lossscale.optax.value_and_grad(loss_fn)(opt_state, params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


params = {"kernel": jnp.full((4, 1), 0.5), "bias": jnp.zeros(1)}
opt_state = tx.init(params)
x, y = jnp.ones((2, 4)), jnp.zeros((2, 1))

trace = []
for batch in (x, x * 2**13, x, x):
    params, opt_state, loss = train_step(params, opt_state, batch, y)
    trace.append(float(lossscale.optax.loss_scale(opt_state)))
    print(f"loss {float(loss):.5g}, next scale {trace[-1]:g}")
print(*(f"{scale:g}" for scale in trace), "- steps skipped:", int(opt_state.steps_skipped))

"""Trains an Equinox model in float16. The second batch overflows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import lossscale
import lossscale.optax

rule = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
tx = lossscale.optax.loss_scaled(optax.adam(0.01), rule=rule)


def loss_fn(model, x, y):
    half = jax.tree.map(lambda a: a.astype(jnp.float16) if eqx.is_inexact_array(a) else a, model)
    prediction = jax.vmap(half)(x.astype(jnp.float16))
    return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)


# Equinox leaves out what is no array, such as the activation function.
value_and_grad = lossscale.optax.value_and_grad(loss_fn, grad=eqx.filter_value_and_grad)


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, model, opt_state):
    loss, grads = value_and_grad(opt_state, model, *batch)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return eqx.apply_updates(model, updates), opt_state, loss


model = eqx.nn.MLP(4, 1, width_size=8, depth=1, key=jax.random.key(0))
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
x, y = jnp.ones((2, 4)), jnp.zeros((2, 1))

trace = []
for batch in (x, x * 2**13, x, x):
    model, opt_state, loss = train_step((batch, y), model, opt_state)
    trace.append(float(lossscale.optax.loss_scale(opt_state)))
    print(f"loss {float(loss):.5g}, next scale {trace[-1]:g}")
print(*(f"{scale:g}" for scale in trace), "- steps skipped:", int(opt_state.steps_skipped))

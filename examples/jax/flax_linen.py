"""Trains a Flax linen model in float16 with a `TrainState`. The second batch overflows."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import lossscale
import lossscale.optax


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, dtype=jnp.float16)(x))
        return nn.Dense(1, dtype=jnp.float16)(x)


rule = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
tx = lossscale.optax.loss_scaled(optax.adam(0.01), rule=rule)
net = Net()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, x, y):
    def loss_fn(params):
        prediction = state.apply_fn({"params": params}, x)
        return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)

    loss, grads = lossscale.optax.value_and_grad(loss_fn)(state.opt_state, state.params)
    # The gradients are still scaled. `tx` divides them, looks at them, and applies or skips.
    return state.apply_gradients(grads=grads), loss


x, y = jnp.ones((2, 4)), jnp.zeros((2, 1))
params = net.init(jax.random.key(0), x)["params"]
state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

trace = []
for batch in (x, x * 2**13, x, x):
    state, loss = train_step(state, batch, y)
    trace.append(float(lossscale.optax.loss_scale(state.opt_state)))
    print(f"loss {float(loss):.5g}, next scale {trace[-1]:g}")
skipped = int(state.opt_state.steps_skipped)
print(*(f"{scale:g}" for scale in trace), "- steps skipped:", skipped)

"""Trains a Flax NNX model in float16 with `nnx.Optimizer`. The second batch overflows."""

import jax.numpy as jnp
import optax
from flax import nnx

import lossscale
import lossscale.optax


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.out = nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


rule = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
tx = lossscale.optax.loss_scaled(optax.adam(0.01), rule=rule)


def loss_fn(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


# NNX differentiates with a function of its own, because a module is no tree of arrays.
value_and_grad = lossscale.optax.value_and_grad(loss_fn, grad=nnx.value_and_grad)


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = value_and_grad(optimizer.opt_state, model, x, y)
    optimizer.update(model, grads, value=loss)
    return loss


model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
x, y = jnp.ones((2, 4)), jnp.zeros((2, 1))

trace = []
for batch in (x, x * 2**13, x, x):
    loss = train_step(model, optimizer, batch, y)
    trace.append(float(lossscale.optax.loss_scale(optimizer.opt_state)))
    print(f"loss {float(loss):.5g}, next scale {trace[-1]:g}")
skipped = int(optimizer.opt_state.steps_skipped.get_value())
print(*(f"{scale:g}" for scale in trace), "- steps skipped:", skipped)

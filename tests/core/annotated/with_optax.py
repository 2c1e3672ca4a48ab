"""Optax, in a compiled step of its own and in an optimizer of Flax NNX."""

from typing import reveal_type

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lossscale.optax

Params = dict[str, jax.Array]
tx = lossscale.optax.loss_scaled(optax.adamw(1e-3), rule=lossscale.DynamicScale(2.0**10))
reveal_type(tx)  # GradientTransformationExtraArgs[LossScaleState]
plain: optax.GradientTransformation = tx


def loss_fn(params: Params, batch: jax.Array, weight: float = 1.0) -> jax.Array:
    return weight * ((batch @ params["w"]) ** 2).mean()


def loss_and_more(params: Params, batch: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, batch), len(params)


@jax.jit
def step(
    params: Params, opt_state: lossscale.optax.LossScaleState, batch: jax.Array
) -> tuple[optax.Params, lossscale.optax.LossScaleState, jax.Array]:
    value_and_grad = lossscale.optax.value_and_grad(loss_fn)
    loss, grads = value_and_grad(opt_state, params, batch, weight=2.0)
    reveal_type(loss)  # Array
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params: Params = {"w": jnp.ones((2, 1))}
opt_state = tx.init(params)
reveal_type(opt_state)  # LossScaleState
reveal_type(opt_state.loss_scale)  # Array
reveal_type(opt_state.steps_skipped)  # Array
reveal_type(opt_state.rule_state["good_steps"])  # Array
_, opt_state, loss = step(params, opt_state, jnp.ones((4, 2)))
pair, grads = lossscale.optax.value_and_grad(loss_and_more, has_aux=True)(
    opt_state, params, jnp.ones((4, 2))
)
reveal_type(pair)  # tuple[Array, int]
kept = lossscale.optax.unless_skipped(opt_state, {"mean": loss}, {"mean": jnp.zeros(())})
reveal_type(kept)  # dict[str, Array]
reveal_type(lossscale.optax.loss_scale(opt_state))  # Array
reveal_type(lossscale.optax.scale_loss(opt_state, loss))  # Array
tracking = lossscale.optax.loss_scaled(optax.adam(0.1), track_overflows=True)
reveal_type(tracking.init(params).tracked)  # Any
copied = lossscale.optax.master_weights(optax.adam(0.1)).init(params)
reveal_type(copied)  # MasterWeightsState

# An optimizer's state may be annotated as Optax annotates it.
annotated: optax.OptState = opt_state
reveal_type(tx.update(params, annotated, params)[1])  # LossScaleState

model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_of(model: nnx.Linear, batch: jax.Array) -> jax.Array:
    loss: jax.Array = (model(batch) ** 2).mean()
    return loss


batch = jnp.ones((4, 2))
with lossscale.optax.Monitor(tx, nnx.state(model, nnx.Param), optimizer) as monitor:
    loss, grads = lossscale.optax.value_and_grad(loss_of, grad=nnx.value_and_grad)(
        optimizer, model, batch
    )
    optimizer.update(model, grads)
    monitor.step(optimizer, loss)
reveal_type(loss)  # Array

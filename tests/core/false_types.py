"""Functions with false annotations. `test_types.py` has mypy refuse each line that says so."""

import flax.nnx
import jax
import jaxlib
import optax
import torch

import lossscale.optax
import lossscale.torch
from lossscale.jax import gradients as jax_gradients
from lossscale.optax import scale_state
from lossscale.torch import gradients, ranks, scale
from lossscale.torch.engine import Engine


def of_torch(tensor: torch.Tensor) -> None:
    where: str = tensor.device  # refused
    total: float = tensor.sum()  # refused
    gradient: torch.Tensor = tensor.grad  # refused
    tensor.no_such_method()  # refused
    print(where, total, gradient)


def of_ours_on_torch(tensor: torch.Tensor, engine: Engine) -> None:
    spread: torch.Tensor = ranks._dtensor()  # refused
    number: float = engine.scale.tensor  # refused
    overflow: int = gradients.any_overflow([])  # refused
    counts: scale.Counts = engine.scale.counts.iterations  # refused
    ranks.has_half_gradients("weight")  # refused
    lossscale.torch.MasterWeights(engine.inner).masters[tensor].no_such_method()  # refused
    print(spread, number, overflow, counts)


def of_jax(array: jax.Array, state: lossscale.optax.LossScaleState) -> None:
    version: int = jaxlib.__version__  # refused
    shape: str = array.shape  # refused
    array.no_such_method()  # refused
    skipped: int = state.last_step_skipped  # refused
    wide: float = jax_gradients.widened(array)  # refused
    leaf: str = scale_state.array_in(array)  # refused
    print(version, shape, skipped, wide, leaf)


def of_optax_and_flax(inner: optax.GradientTransformation, model: flax.nnx.Module) -> None:
    optax.sgd("fast")  # refused
    init: int = optax.adamw(1e-3).init  # refused
    flax.nnx.Linear("two", 1, rngs=flax.nnx.Rngs(0))  # refused
    state: int = flax.nnx.state(model)  # refused
    lossscale.optax.loss_scaled(5)  # refused
    inner.no_such_function()  # refused
    print(init, state)

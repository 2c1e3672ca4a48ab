"""`lossscale.optax.explain`: the causes of faults, and what it leaves alone."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import broken_blocks
import lossscale.optax
from broken_blocks import FAULTS, SHARED
from frameworks.jax.explain_cases import BATCH, CASES, PARAMS
from lossscale.errors import ArgumentError
from lossscale.monitoring.explanation import Cause

explain = lossscale.optax.explain


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(name):
    loss_fn, causes, operations, module = CASES[name]
    found = explain(loss_fn, PARAMS, BATCH)
    assert str(found.cause) in causes.split(", "), found.text
    assert any(each in found.operation for each in operations.split())
    assert module in found.module
    assert found.module in found.text


NUMPY = types.SimpleNamespace(
    **{name: getattr(jnp, name) for name in SHARED.split() if hasattr(jnp, name)},
    inf=jnp.inf,
    rsqrt=jax.lax.rsqrt,
    softmax=jax.nn.softmax,
)


@pytest.mark.parametrize("name", FAULTS)
def test_a_block_is_named(name):
    fault = FAULTS[name]

    def loss_fn(params, batch, dtype):
        params = {name: each.astype(dtype) for name, each in params.items()}
        h = batch.astype(dtype) @ params["up"]
        with jax.named_scope("block"):
            h = fault.block(NUMPY, h, params["gain"])
        return fault.loss(NUMPY, (h @ params["head"]).astype(jnp.float32))

    broken_blocks.check(
        name,
        lambda scale: explain(loss_fn, fault.weights, fault.batch, scale=scale),
        lambda: lossscale.optax.diagnose(loss_fn, fault.weights, [fault.batch]),
    )


def dense(params, batch, dtype):
    predicted = batch.astype(dtype) @ params["w"].astype(dtype)
    return jnp.mean(predicted.astype(jnp.float32) ** 2)


X = np.ones((2, 3), np.float32)


def test_halvings_are_those_after_which_a_step_is_finite():
    params = {"w": jnp.ones((3, 1))}
    found = explain(dense, params, X, scale=2.0**20)
    assert (found.cause, found.in_backward) == (Cause.SCALE, True)
    # The gradient of the prediction is 3; that of each weight is twice as large.
    finite = [
        bool(
            jnp.isfinite(
                jax.grad(lambda w, s=s: dense({"w": w}, X, jnp.float16) * s)(params["w"])
            ).all()
        )
        for s in (2.0 ** (21 - found.halvings), 2.0 ** (20 - found.halvings))
    ]
    assert finite == [False, True]
    assert "loss scale of 2**20, dense, line" in found.text


def test_a_mask_beyond_float16_is_told_from_one_that_is_infinite():
    """In float16, -1e9 is minus infinity."""

    def loss_fn(mask, params, batch, dtype):
        scores = jnp.where(batch > 5, batch.astype(dtype) * params["w"].astype(dtype), mask)
        return jax.nn.softmax(scores).astype(jnp.float32).sum()

    params = {"w": jnp.ones(3)}
    for mask, cause, words in (
        (-1e9, Cause.FORWARD_OVERFLOW, "sets is above the largest float16 number"),
        (-jnp.inf, Cause.SINGULAR, "masked as a whole"),
    ):
        found = explain(lambda p, b, d, mask=mask: loss_fn(mask, p, b, d), params, X)
        assert found.cause == cause
        assert words in found.text


def test_only_the_named_parameters_are_differentiated():
    def loss_fn(params, batch, dtype):
        broken = jnp.sqrt(params["a"].astype(dtype) * 0).sum()
        return (broken + params["b"].astype(dtype).sum()).astype(jnp.float32)

    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    assert explain(loss_fn, params, X).cause == Cause.SINGULAR
    assert explain(loss_fn, params, X, parameters=["b"]).cause == Cause.UNKNOWN


def test_a_finite_batch_is_unknown_and_mistakes_are_named():
    params = {"w": jnp.ones((3, 1)) / 8}
    found = explain(dense, params, X)
    assert found.cause == Cause.UNKNOWN
    assert "finite at a scale of 32768" in found.text
    with pytest.raises(ArgumentError, match="scale"):
        explain(dense, params, X, scale=0.0)
    with pytest.raises(ArgumentError, match="nothing in float16"):
        explain(lambda params, batch, dtype: (batch @ params["w"]).mean(), params, X)

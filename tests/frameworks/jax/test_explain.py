"""`lossscale.optax.explain`: the causes of faults, and what it leaves alone."""

import types

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import float16_faults
import lossscale.optax
from float16_faults import AWAY, BROKEN_GRADIENT, FAULTS, OVERFLOW, SHARED, Fault
from lossscale.errors import ArgumentError
from lossscale.monitoring import Cause

explain = lossscale.optax.explain
NUMPY = types.SimpleNamespace(
    **{name: getattr(jnp, name) for name in SHARED.split() if hasattr(jnp, name)},
    inf=jnp.inf,
    rsqrt=jax.lax.rsqrt,
    softmax=jax.nn.softmax,
)


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jax.nn.softmax(x * 1e5 @ x.T) @ x


def of_flax(np, h, gain):
    return linen.Sequential([Attention()]).apply({}, h)


def convolution(np, h, gain):
    @jax.checkpoint
    def large(x):
        with jax.named_scope("middle"):
            kernel = jnp.full((3, 1, 1), 6e4, x.dtype)
            return jax.lax.conv_general_dilated(
                abs(x) + 1, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )

    return jax.jit(large)(h[:, :, None])[..., 0]


def newton(np, h, gain):
    """The inverse of 1 + h**2 by a loop with a fixed number of steps, from a bad start."""
    return jax.lax.fori_loop(0, 12, lambda _, y: y * (2 - (1 + h * h) * y), jnp.full_like(h, 9.0))


def loop_of_rows(np, h, gain):
    """Rows leave a loop one after the other; the result of one more step would be infinite."""
    first = jnp.array([6e4, 1.0, 0.1, 1e-3], h.dtype)
    grown = jax.vmap(lambda x: jax.lax.while_loop(lambda x: x < 1e3, lambda x: x * 90, x))(first)
    return jnp.log(jnp.minimum(h, 0)) + 1 / grown[:, None]


def hidden_in_a_loop(np, h, gain):
    def of_row(x):
        return jax.lax.while_loop(
            lambda c: c[0] < 1 + (x[0] > 0),
            lambda c: (c[0] + 1, c[1] * 900 / (1 + jnp.sqrt((c[1] * c[1] * 900).sum()))),
            (0, x * 0 + 30),
        )[1]

    return jax.vmap(of_row)(jax.lax.stop_gradient(h)) * gain


def branch(np, h, gain):
    return jax.lax.cond(h.max() > 1e9, jnp.sin, lambda h: jnp.log(jnp.minimum(h, 0)), h)


@jax.custom_vjp
def divided(h):
    return h


divided.defvjp(lambda h: (h, None), lambda _, g: (g / (g * 0),))
OWN = {
    "a module of Flax": Fault(of_flax, OVERFLOW, "dot mul", words="/layers_0"),
    "a convolution": Fault(convolution, OVERFLOW, "conv", words="block/middle"),
    "a loop that diverges": Fault(newton, OVERFLOW, "mul"),
    "a loop within vmap": Fault(loop_of_rows, "singular", "log"),
    "a branch": Fault(branch, "singular", "log"),
    "a norm that would be negative from 65,504": Fault(
        lambda np, h, gain: gain / jnp.sqrt((h * 0 + 400) ** 2 - 2 * (h * 0 + 244) ** 2),
        OVERFLOW,
        "pow mul square",
        scale=1.0,
    ),
    "a norm in a loop within vmap": Fault(hidden_in_a_loop, "unknown", "pow mul square", scale=1.0),
    "an overflow that changes nothing": Fault(
        lambda np, h, gain: h * gain + 1 / (1 + h * h), "unknown", scale=2.0**-10, size=800
    ),
    "a deviation of 0 beside an epsilon": Fault(
        lambda np, h, gain: (x := h * 0 + gain) / (jnp.std(x) + 4e-3), BROKEN_GRADIENT, "of sqrt"
    ),
    "a gradient that is divided by 0": Fault(
        lambda np, h, gain: divided(h), BROKEN_GRADIENT, "div"
    ),
}


@pytest.mark.parametrize("name", [*FAULTS, *OWN])
def test_a_block_is_named(name):
    fault = {**FAULTS, **OWN}[name]

    def loss_fn(params, batch, dtype):
        params = {name: each.astype(dtype) for name, each in params.items()}
        h = batch.astype(dtype) @ params["up"]
        with jax.named_scope("block"):
            h = fault.block(NUMPY, h, params["gain"])
        return fault.loss(NUMPY, (h @ params["head"]).astype(jnp.float32))

    float16_faults.check(
        fault,
        lambda scale: explain(loss_fn, fault.weights, fault.batch, scale=scale),
        lambda: lossscale.optax.diagnose(loss_fn, fault.weights, [fault.batch]),
    )


def dense(params, batch, dtype):
    predicted = batch.astype(dtype) @ params["w"].astype(dtype)
    # A line is that of the function that has a name.
    return jax.tree.map(lambda y: jnp.mean(y.astype(jnp.float32) ** 2), predicted)


X = np.ones((2, 3), np.float32)


def test_the_line_of_the_loss_function_is_named():
    found = explain(dense, {"w": jnp.ones((3, 1))}, X, scale=2.0**20)
    assert (found.cause, found.in_backward) == (Cause.SCALE, True)
    assert "loss scale of 2**20, dense, line" in found.text


# By the operation that is named, in a line with others: a function of a parameter and a number.
IN_A_LINE = {
    "dot_general": lambda w, x: x / 300 @ w,
    "mul": lambda w, x: x / 300 @ jnp.ones_like(w) * w * 60,
    "log": lambda w, x: jnp.log(w / 1e4) * (x / 300),
    "div": lambda w, x: x * 2 / (w / 64),
    "sqrt": lambda w, x: jnp.sqrt(w / 1e4) * x / 300,
    "exp": lambda w, x: jnp.exp(w * 6) * (x / 300),
    "pow": lambda w, x: (w / 8) ** -1.5 * (x / 300),
}


@pytest.mark.parametrize("name", IN_A_LINE)
@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.vmap])
def test_of_several_operations_in_a_line_that_of_the_gradient_is_named(name, around):
    def loss_fn(params, batch, dtype):
        function = around(IN_A_LINE[name])
        return jnp.sum(function(params["w"].astype(dtype), batch.astype(dtype)).astype(jnp.float32))

    shape = (3, 3, 3) if around is jax.vmap else (3, 3)
    found = explain(loss_fn, {"w": jnp.ones(shape)}, np.full(shape, 300.0, np.float32))
    assert (found.cause, found.operation) == (Cause.SCALE, f"backward of {name}")


# Optax' losses, and means, consist of small operations.
ADVICE = {**float16_faults.ADVICE, "no numbers": (AWAY, lambda _, x: x[:0].mean())}


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_advised_fits_the_operation(name):
    advice, function = ADVICE[name]

    def loss_fn(params, batch, dtype):
        zeros = batch.astype(dtype) @ params["w"].astype(dtype) * 0
        return jnp.sum(function(NUMPY, zeros).astype(jnp.float32))

    float16_faults.check_advice(advice, explain(loss_fn, {"w": jnp.ones((3, 3))}, X))


def test_a_ctc_loss_of_a_long_label_is_finite():
    def loss_fn(params, batch, dtype):
        logits = (batch.astype(dtype) @ params["w"].astype(dtype)).astype(jnp.float32)[None]
        return optax.ctc_loss(logits, jnp.zeros((1, 2)), jnp.ones((1, 3), int), jnp.zeros((1, 3)))

    assert explain(loss_fn, {"w": jnp.ones((3, 3))}, X).cause == Cause.UNKNOWN


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

"""Passes of a loss in JAX: every number beside one that is computed by hand; and its report."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lossscale.optax
from frameworks.jax.support import bits
from lossscale.diagnosis.jax import JaxGradientFunction, explain
from lossscale.diagnosis.report import Verdict
from lossscale.errors import ArgumentError

diagnose = lossscale.optax.diagnose
LOSES = 2.0**-22
X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)


def drawn(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(np.float32)


def mean_square(outputs):
    return jnp.mean(outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32)) ** 2) * LOSES


def dense(params, batch, dtype):
    first, second = (w.astype(dtype) for w in params)
    return mean_square(jnp.tanh(batch.astype(dtype) @ first) @ second)


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, slope: (3 * x**2 * slope,))


def own_derivative(params, batch, dtype):
    return mean_square(cubed(batch.astype(dtype) @ params["w"].astype(dtype))) / 64


def dropped(params, batch, dtype):
    kept = jax.random.bernoulli(batch["key"], 0.7, (12, 6))
    return mean_square(jnp.where(kept, batch["x"], 0).astype(dtype) @ params["w"].astype(dtype))


LOSSES = {
    "dense": (dense, (drawn(6, 8), drawn(8, 3)), [X, X + 1]),
    "own derivative": (own_derivative, {"w": drawn(6, 5)}, [X]),
    "dropout": (dropped, {"w": drawn(6, 5)}, [{"x": X, "key": jax.random.key(1)}]),
    "parameters in 16 bits": (own_derivative, {"w": drawn(6, 5).astype(np.float16)}, [X]),
}


@functools.cache
def compiled(loss_fn, dtype):
    exactly = {"xla_allow_excess_precision": False}
    derive = jax.grad(lambda p, b, s: loss_fn(p, b, dtype) * s)
    return jax.jit(derive, compiler_options=exactly)


def by_hand(loss_fn, params, batch, scale, dtype):
    """The gradients of the scaled loss of a compiled training step."""
    if dtype == jnp.float32:
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    gradients = compiled(loss_fn, dtype)(params, batch, jnp.float32(scale))
    return [np.float32(leaf) for leaf in jax.tree.leaves(gradients)]


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_those_of_a_compiled_training_step_which_needs_a_scale(kind):
    loss_fn, params, batches = LOSSES[kind]
    before = bits((params, batches))
    run = JaxGradientFunction(params, loss_fn)
    for half, scale in ((False, 1), (True, 1), (True, 64)):
        dtype = jnp.float16 if half else jnp.float32
        found = run(batches[0], scale, half)
        wanted = by_hand(loss_fn, params, batches[0], scale, dtype)
        close = 1e-5
        for gradient, expected in zip(found.gradients.values(), wanted, strict=True):
            assert gradient.dtype == np.float32
            largest = np.abs(expected).max()
            np.testing.assert_allclose(gradient, expected, rtol=close, atol=close * largest + 6e-8)
        value = loss_fn(jax.tree.map(jnp.asarray, params), batches[0], dtype)
        assert found.loss == pytest.approx(float(value), rel=1e-2)
    report = diagnose(loss_fn, params, batches)
    assert report.verdict is Verdict.NEEDED
    last = by_hand(loss_fn, params, batches[0], report.rule.initial_scale, jnp.float16)
    assert all(np.isfinite(gradient).all() for gradient in last)
    assert bits((params, batches)) == before


def test_a_loss_is_judged_by_what_it_trains():
    params = {"critic": {"w": drawn(6, 5)}, "actor": {"w": drawn(5, 6).T}, "actors": drawn(3)}

    def loss_fn(params, batch, dtype):
        batch = batch.astype(dtype)
        return sum(mean_square(batch @ params[n]["w"].astype(dtype)) for n in ("critic", "actor"))

    for owned in ("critic", "actor"):
        found = JaxGradientFunction(params, loss_fn, [owned])(X, 1.0, True)
        assert list(found.gradients) == [f"{owned}/w"]
    assert JaxGradientFunction(params, loss_fn, "critic")(X, 1.0, True).gradients
    for run, batches in ((diagnose, [X]), (explain, X)):
        for owned, words in ((["nobody"], "'nobody', which is none of 'actor/w'"), ([], "nothing")):
            with pytest.raises(ArgumentError, match=words):
                run(loss_fn, params, batches, parameters=owned)
        with pytest.raises(ArgumentError, match="floating-point array to train"):
            run(loss_fn, {"name": "critic"}, batches)


def test_what_is_no_number_to_train_has_no_gradient():
    def loss_fn(params, batch, dtype):
        return mean_square(batch.astype(dtype) @ params["w"].astype(dtype)) * params["n"][0]

    params = {"w": drawn(6, 5), "n": np.array([2]), "key": jax.random.key(0)}
    found = JaxGradientFunction(params, loss_fn)(X, 1.0, True)
    assert list(found.gradients) == ["w"]


def test_a_model_of_nnx_or_equinox_is_a_tree_whose_gradients_have_names():
    def nnx_loss(model, batch, dtype):
        model.set_attributes(dtype=dtype, raise_if_not_found=False)
        return mean_square(model(batch))

    def equinox_loss(model, batch, dtype):
        cast = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
        return mean_square(jax.vmap(cast)(batch.astype(dtype)))

    layers = [nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.Dropout(0.5, rngs=nnx.Rngs(1))]
    model = nnx.Sequential(*layers)
    before = bits(nnx.state(model)), model.layers[0].dtype
    linear = eqx.nn.Linear(6, 3, key=jax.random.key(0))
    for loss_fn, params, names in (
        (nnx_loss, model, {"layers/0/bias", "layers/0/kernel"}),
        (equinox_loss, linear, {"bias", "weight"}),
    ):
        report = diagnose(loss_fn, params, [X])
        assert {each.name for each in report.measurement.gradients} == names
        assert report.verdict is Verdict.NEEDED
    assert (bits(nnx.state(model)), model.layers[0].dtype) == before


MISTAKES = {
    "float16 always": (
        lambda p, b, d: mean_square(b.astype(jnp.float16) @ p["w"].astype(jnp.float16)),
        "computes in float16 when dtype is float32",
    ),
    "float32 always": (
        lambda p, b, d: mean_square(b @ p["w"]),
        "computes nothing in float16 when dtype is float16",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loss_that_cannot_be_used_is_named(mistake):
    loss_fn, message = MISTAKES[mistake]
    with pytest.raises(ArgumentError, match=message):
        diagnose(loss_fn, {"w": drawn(6, 5)}, [X])

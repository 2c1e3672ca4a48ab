"""`unless_skipped`: what a forward pass changes follows the applied steps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lossscale
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning
from lossscale.optax import loss_scaled, unless_skipped, value_and_grad

TX = loss_scaled(
    optax.sgd(0.05, momentum=0.9), rule=lossscale.FixedScale(2.0**6, skip_nonfinite=True)
)
BATCHES = np.random.default_rng(0).normal(size=(6, 8, 3)).astype("float32")
BATCHES[2] *= 1e6
BATCHES, CLEAN = jnp.asarray(BATCHES), jnp.asarray(np.delete(BATCHES, 2, 0))


def step(carry, x):
    params, mean, opt_state = carry

    def loss_fn(params):
        hidden = x.astype(jnp.float16) @ params.astype(jnp.float16)
        new = 0.5 * mean + 0.5 * hidden.mean(0)
        return jnp.mean((hidden - new).astype(jnp.float32) ** 2), new

    (_, new), grads = value_and_grad(loss_fn, has_aux=True)(opt_state, params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (
        optax.apply_updates(params, updates),
        unless_skipped(opt_state, new, mean),
        opt_state,
    ), 0


def trained(way, batches):
    params = jnp.ones((3, 4)) / 8
    carry = params, jnp.zeros(4), TX.init(params)
    if way == "scan":
        return jax.jit(lambda c, x: jax.lax.scan(step, c, x))(carry, batches)[0]
    for x in batches:
        carry, _ = (jax.jit(step) if way == "jit" else step)(carry, x)
    return carry


class Module(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.first(x))


def trained_nnx(way, batches):
    model = Module()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model, x):
        return jnp.mean((model(x).astype(jnp.float32) - 1) ** 2)

    def step(model, optimizer, x):
        old = nnx.clone(nnx.state(model, nnx.BatchStat))
        _, grads = value_and_grad(loss_fn, grad=nnx.value_and_grad)(optimizer.opt_state, model, x)
        optimizer.update(model, grads)
        nnx.update(model, unless_skipped(optimizer, nnx.state(model, nnx.BatchStat), old))

    step = nnx.jit(step) if way == "jit" else step
    for x in batches:
        step(model, optimizer, x)
    return nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat), optimizer.opt_state


@pytest.mark.parametrize(
    ("train", "way"),
    [
        *((trained, way) for way in ("eager", "jit", "scan")),
        *((trained_nnx, way) for way in ("eager", "jit")),
    ],
)
def test_a_run_ends_as_one_that_was_never_given_the_skipped_batch(train, way):
    found, expected = train(way, BATCHES), train(way, CLEAN)
    assert [int(jax.tree.leaves(each[2].steps_skipped)[0]) for each in (found, expected)] == [1, 0]
    found, expected = [(*each[:2], each[2].inner_state) for each in (found, expected)]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def state(skipped):
    return TX.init(jnp.ones(2))._replace(consecutive_skips=jnp.asarray(skipped, int))


LEAVES = {
    "wide": (jnp.float32([jnp.nan, 2.0]), jnp.bfloat16([0.5, 1.0])),
    "narrow": (jnp.bfloat16([3.0]), jnp.bfloat16([1.0])),
    "count": (jnp.int32(5), jnp.int32(4)),
    "flag": (jnp.asarray(True), jnp.asarray(False)),
    "key": (jax.random.key(2), jax.random.key(1)),
}


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("function", [unless_skipped, jax.jit(unless_skipped)])
def test_any_tree_keeps_its_dtypes(skipped, function):
    new, old = ({"none": None} | {n: pair[i] for n, pair in LEAVES.items()} for i in range(2))
    found = function(state(skipped), new, old)
    assert found.pop("none") is None
    for name, leaf in found.items():
        assert leaf.dtype == new[name].dtype
        one, other = (
            jax.random.key_data(each) if name == "key" else np.asarray(each, np.float32)
            for each in (leaf, LEAVES[name][skipped])
        )
        np.testing.assert_array_equal(one, other)


def test_numbers_of_python_what_is_no_array_and_what_holds_the_state():
    class TrainState:
        opt_state = state(True)

    new, old = {"steps": 3, "act": jax.nn.relu}, {"steps": 2, "act": jax.nn.relu}
    found = unless_skipped(TrainState(), new, old)
    assert int(found["steps"]) == 2
    assert found["act"] is jax.nn.relu


def test_a_population_is_taken_one_by_one():
    states = jax.vmap(TX.init)(jnp.ones((3, 2)))._replace(consecutive_skips=jnp.array([1, 0, 2]))
    new, old = jnp.arange(3.0) + 10, jnp.arange(3.0)
    assert jax.vmap(unless_skipped)(states, new, old).tolist() == [0.0, 11.0, 2.0]
    with pytest.raises(ArgumentError, match=r"decisions of shape \(3,\).* inside the vmap"):
        unless_skipped(states, new, old)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 1.0, 1.0), ArgumentTypeError, "`opt_state` must be the state"),
        ((optax.sgd(0.1).init(1.0), 1.0, 1.0), ArgumentTypeError, "`opt_state` must be the state"),
        ((state(True), {"a": 1.0}, {"b": 2.0}), ArgumentError, "of the same form"),
        (
            (state(True), {"a": jnp.ones(2)}, {"a": jnp.ones(3)}),
            ArgumentError,
            r"`\['a'\]` has shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        unless_skipped(*arguments)


def test_a_state_of_nnx_that_is_no_copy_is_noticed():
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    old = nnx.state(norm, nnx.BatchStat)
    norm(jnp.ones((3, 2)))
    with pytest.warns(LossScaleWarning, match="the same arrays"):
        unless_skipped(state(True), nnx.state(norm, nnx.BatchStat), old)
    with warnings.catch_warnings(action="error"):
        for without_arrays in ({}, {"activation": jax.nn.relu, "name": "norm"}):
            unless_skipped(state(True), without_arrays, without_arrays)

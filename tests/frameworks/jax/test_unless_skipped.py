"""`unless_skipped`: what a forward pass changes follows the applied steps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import lossscale
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning
from lossscale.optax import loss_scaled, unless_skipped, value_and_grad

TX = loss_scaled(
    optax.sgd(0.05, momentum=0.9), rule=lossscale.FixedScale(2.0**6, skip_nonfinite=True)
)
BATCHES = np.random.default_rng(0).normal(size=(6, 8, 3)).astype("float32")
BATCHES[2] *= 1e6
BATCHES, CLEAN = jnp.asarray(BATCHES), jnp.asarray(np.delete(BATCHES, 2, 0))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, dtype=jnp.float16)(x)
        x = linen.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return linen.Dense(1, dtype=jnp.float16)(x)


def linen_step(carry, x):
    params, stats, opt_state = carry

    def loss_fn(params):
        variables = {"params": params, "batch_stats": stats}
        out, new = Net().apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(out.astype(jnp.float32) ** 2), new["batch_stats"]

    (_, new), grads = value_and_grad(loss_fn, has_aux=True)(opt_state, params)
    updates, opt_state = TX.update(grads, opt_state, params)
    new = unless_skipped(opt_state, new, stats)
    return (optax.apply_updates(params, updates), new, opt_state), None


def trained_linen(way, batches):
    variables = Net().init(jax.random.key(0), BATCHES[0])
    carry = variables["params"], variables["batch_stats"], TX.init(variables["params"])
    if way == "scan":
        carry, _ = jax.jit(lambda c, x: jax.lax.scan(linen_step, c, x))(carry, batches)
    else:
        step = jax.jit(linen_step) if way == "jit" else linen_step
        for x in batches:
            carry, _ = step(carry, x)
    return carry


class Module(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.last = nnx.Linear(4, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def trained_nnx(way, batches):
    model = Module()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

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
        *((trained_linen, way) for way in ("eager", "jit", "scan")),
        *((trained_nnx, way) for way in ("eager", "jit")),
    ],
)
def test_a_run_ends_as_one_that_was_never_given_the_skipped_batch(train, way):
    found, expected = train(way, BATCHES), train(way, CLEAN)
    assert [int(jax.tree.leaves(each[2].steps_skipped)[0]) for each in (found, expected)] == [1, 0]
    for one, other in zip(
        jax.tree.leaves((found[:2], found[2].inner_state)),
        jax.tree.leaves((expected[:2], expected[2].inner_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def state(skipped):
    return TX.init(jnp.ones(2))._replace(consecutive_skips=jnp.asarray(skipped, int))


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_any_tree_keeps_its_dtypes(skipped, compiled):
    new = {
        "wide": jnp.float32([jnp.nan, 2.0]),
        "narrow": jnp.bfloat16([3.0]),
        "count": jnp.int32(5),
        "flag": jnp.asarray(True),
        "key": jax.random.key(2),
        "none": None,
    }
    old = {
        "wide": jnp.bfloat16([0.5, 1.0]),
        "narrow": jnp.bfloat16([1.0]),
        "count": jnp.int32(4),
        "flag": jnp.asarray(False),
        "key": jax.random.key(1),
        "none": None,
    }
    function = jax.jit(unless_skipped) if compiled else unless_skipped
    found, expected = function(state(skipped), new, old), old if skipped else new
    for name, leaf in found.items():
        if leaf is not None:
            assert leaf.dtype == new[name].dtype
            one, other = (
                jax.random.key_data(each) if name == "key" else np.asarray(each, np.float32)
                for each in (leaf, expected[name])
            )
            np.testing.assert_array_equal(one, other)
    assert found["none"] is None


def test_python_numbers_and_what_is_no_array():
    new, old = {"steps": 3, "act": jax.nn.relu}, {"steps": 2, "act": jax.nn.relu}
    found = unless_skipped(state(True), new, old)
    assert int(found["steps"]) == 2
    assert found["act"] is jax.nn.relu


def test_it_takes_what_holds_the_state():
    class TrainState:
        opt_state = state(True)

    assert float(unless_skipped(TrainState(), jnp.float32(2), jnp.float32(1))) == 1.0


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
        ((state(True), {"a": 1.0}, {"b": 2.0}), ValueError, "key"),
        ((state(True), {"a": jnp.ones(2)}, {"a": jnp.ones(3)}), ArgumentError, r"at \['a'\]"),
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unless_skipped(state(True), {}, {})

"""Passes of a loss in JAX beside those of a training step, and the report on it."""

import functools

import equinox as eqx
import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lossscale.optax
from frameworks.jax.support import bits
from lossscale.diagnosis.passes import LOSS, MODEL
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.optax.passes import new_run

diagnose = lossscale.optax.diagnose
LOSES = 2.0**-22
X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
TOKENS = np.array([[1, 1, 2], [3, 1, 0]])


pytestmark = pytest.mark.usefixtures("compiled_quickly")


def drawn(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(np.float32)


def mean_square(outputs):
    return jnp.mean(outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32)) ** 2) * LOSES


def dense(params, batch, dtype):
    first, second = (w.astype(dtype) for w in params)
    return mean_square(jnp.tanh(batch.astype(dtype) @ first) @ second)


def embedded(params, batch, dtype):
    rows = params["table"].astype(dtype)[batch]
    # The table again: what comes out is of the same tokens.
    return mean_square((rows @ params["kernel"].astype(dtype)) @ params["table"].astype(dtype).T)


def recurrent(params, batch, dtype):
    def step(state, x):
        return jnp.tanh(state @ params["inner"].astype(dtype) + x), None

    state, _ = jax.lax.scan(step, jnp.zeros(6, dtype), batch.astype(dtype))
    return mean_square(state)


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, slope: (3 * x**2 * slope,))


def own_derivative(params, batch, dtype):
    return mean_square(cubed(batch.astype(dtype) @ params["w"].astype(dtype))) / 64


def dropped(params, batch, dtype):
    kept = jax.random.bernoulli(batch["key"], 0.7, (12, 6))
    return mean_square(jnp.where(kept, batch["x"], 0).astype(dtype) @ params["w"].astype(dtype))


def casting(params, batch, dtype):
    del dtype
    return mean_square(batch.astype(jnp.float16) @ params["w"].astype(jnp.float16))


LOSSES = {
    "dense": (dense, (drawn(6, 8), drawn(8, 3)), [X, X + 1]),
    "embedding, shared": (embedded, {"table": drawn(5, 4), "kernel": drawn(4, 4)}, [TOKENS]),
    "recurrent": (recurrent, {"inner": drawn(6, 6)}, [X]),
    "own derivative": (own_derivative, {"w": drawn(6, 5)}, [X]),
    "dropout": (dropped, {"w": drawn(6, 5)}, [{"x": X, "key": jax.random.key(1)}]),
    "casts by itself": (casting, {"w": drawn(6, 5)}, [X]),
    "parameters in 16 bits": (own_derivative, {"w": drawn(6, 5).astype(np.float16)}, [X]),
}


@functools.cache
def compiled(loss_fn, dtype):
    return jax.jit(jax.grad(lambda p, b, s: loss_fn(p, b, dtype) * s))


def by_hand(loss_fn, params, batch, scale, dtype):
    """The gradients of the scaled loss of a compiled training step."""
    if dtype == jnp.float32:
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    gradients = compiled(loss_fn, dtype)(params, batch, jnp.float32(scale))
    return [np.float64(leaf) for leaf in jax.tree.leaves(gradients)]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_pass_has_the_gradients_of_a_training_step_and_the_report_says_what_it_loses(kind):
    loss_fn, params, batches = LOSSES[kind]
    before = bits((params, batches))
    run = new_run(params, loss_fn)
    for dtype, scale in ((jnp.float32, 1.0), (jnp.float16, 1.0), (jnp.float16, 64.0)):
        wanted = by_hand(loss_fn, params, batches[0], scale, dtype)
        found = run(batches[0], scale, dtype == jnp.float16)[LOSS].gradients
        for one, other in zip(found.values(), wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    report = diagnose(loss_fn, params, batches)
    assert bits((params, batches)) == before
    # Every loss of these loses something that a scale mends.
    assert report.verdict == "needed"
    top = report.measurements[LOSS].top
    last = [[by_hand(loss_fn, params, b, 2.0 ** (top + 1), jnp.float16) for b in batches]]
    assert not all(np.isfinite(h).all() for batch in last for each in batch for h in each)


def test_what_each_operation_returns_is_seen_in_both_precisions_by_the_same_names():
    def loss_fn(params, batch, dtype):
        @jax.checkpoint
        def hidden(x):
            return jax.nn.relu(x @ params["first"].astype(dtype))

        with jax.named_scope("head"):
            outputs = jax.jit(lambda x: x @ params["second"].astype(dtype))(
                hidden(batch.astype(dtype))
            )
        return jnp.mean((outputs.astype(jnp.float32) - 9000) ** 2)

    params = {"first": drawn(6, 8), "second": drawn(8, 3)}
    run = new_run(params, loss_fn)
    wide, narrow = (run(X, 1.0, half, watch=True)[LOSS].outputs for half in (False, True))
    head = next(name for name in narrow if "head" in name)
    assert "(dot_general)" in head
    assert sum("dot_general" in name for name in narrow) == 2
    assert set(narrow) <= set(wide)
    assert narrow[MODEL] == narrow[head]
    outputs = np.maximum(X @ params["first"], 0) @ params["second"]
    assert wide[MODEL].largest == pytest.approx(np.abs(outputs).max(), rel=1e-5)
    assert narrow[MODEL].largest == pytest.approx(np.abs(outputs).max(), rel=1e-2)
    assert wide[MODEL].reach == pytest.approx(9000, rel=1e-4)
    assert run(X, 1.0, False, move=MODEL)[LOSS].loss < 100


def test_an_operation_that_overflows_is_named():
    def loss_fn(params, batch, dtype):
        return jnp.mean(jnp.tanh((batch.astype(dtype) @ params["w"].astype(dtype)) * dtype(6e4)))

    report = diagnose(loss_fn, {"w": drawn(6, 5)}, [X])
    assert report.verdict == "cannot help"
    assert "(mul) goes beyond the range of float16" in str(report)


def test_losses_have_a_verdict_each_by_what_their_optimizer_owns():
    def losses(params, batch, dtype):
        outputs = batch.astype(dtype) @ params["critic"]["w"].astype(dtype)
        actor = outputs @ params["actor"]["w"].astype(dtype)
        return {"critic": mean_square(outputs) / LOSES, "actor": mean_square(actor) / 2**20}

    params = {"critic": {"w": drawn(6, 5)}, "actor": {"w": drawn(5, 2)}}
    owned = {"critic": ("critic",), "actor": ("actor/w",)}
    report = diagnose(losses, params, [X], parameters=owned)
    kinds = {name: each.kind.value for name, each in report.verdicts.items()}
    assert kinds == {"actor": "needed", "critic": "not needed"}
    names = {n: [g.name for g in m.gradients] for n, m in report.measurements.items()}
    assert names == {"critic": ["critic/w"], "actor": ["actor/w"]}
    with pytest.raises(ArgumentError, match="`parameters` names the loss 'generator'"):
        diagnose(losses, params, [X], parameters={"generator": ("actor",)})
    with pytest.raises(ArgumentError, match="there are actor/w, critic/w"):
        diagnose(losses, params, [X], parameters={"critic": ("dense",)})
    with pytest.raises(ArgumentError, match="With `grad` there may be one loss"):
        diagnose(losses, params, [X], grad=jax.value_and_grad)


class Linen(flax.linen.Module):
    dtype: object

    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(3, dtype=self.dtype)(x)


def test_libraries_of_modules_need_nothing_but_their_own_way_to_say_a_dtype():
    variables = Linen(jnp.float32).init(jax.random.key(0), X)

    def linen_loss(params, batch, dtype):
        return mean_square(Linen(dtype).apply(params, batch))

    def nnx_loss(model, batch, dtype):
        model.set_attributes(dtype=dtype, raise_if_not_found=False)
        return mean_square(model(batch))

    def equinox_loss(model, batch, dtype):
        cast = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
        return mean_square(jax.vmap(cast)(batch.astype(dtype)))

    layers = [nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.Dropout(0.5, rngs=nnx.Rngs(1))]
    model = nnx.Sequential(*layers)
    model.layers[0].kernel.set_value(variables["params"]["Dense_0"]["kernel"])
    before = bits(nnx.state(model)), model.layers[0].dtype
    network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))

    def haiku_loss(params, batch, dtype):
        half = jax.tree.map(lambda p: p.astype(dtype), params)
        return mean_square(network.apply(half, batch.astype(dtype)))

    linear = eqx.nn.Linear(6, 3, key=jax.random.key(0))
    reports = {
        "linen": diagnose(linen_loss, variables, [X]),
        "nnx": diagnose(nnx_loss, model, [X], grad=nnx.value_and_grad),
        "haiku": diagnose(haiku_loss, network.init(jax.random.key(0), X), [X]),
        "equinox": diagnose(equinox_loss, linear, [X], grad=eqx.filter_value_and_grad),
    }
    assert (bits(nnx.state(model)), model.layers[0].dtype) == before
    names = {
        kind: {each.name for each in report.measurements[LOSS].gradients}
        for kind, report in reports.items()
    }
    assert names == {
        "linen": {"params/Dense_0/bias", "params/Dense_0/kernel"},
        "nnx": {"layers/0/bias", "layers/0/kernel"},
        "haiku": {"linear/b", "linear/w"},
        "equinox": {"bias", "weight"},
    }
    assert all(report.verdict == "needed" for report in reports.values())
    operations = {each.name for each in reports["linen"].measurements[LOSS].operations}
    assert any("Dense_0" in name for name in operations)


def test_the_scale_of_an_optimizer_is_measured_as_well():
    loss_fn, params, batches = LOSSES["own derivative"]
    import optax

    tx = lossscale.optax.loss_scaled(optax.sgd(0.1), initial_scale=32)
    report = diagnose(loss_fn, params, batches, in_use=tx.init(params))
    assert report.measurements[LOSS].in_use[0] == 32.0
    assert "JAX, cpu, compiled with dtype=float16" in str(report)
    assert str(report).startswith("own_derivative: loss scaling is needed. rule = ")


MISTAKES = {
    "two arguments": (lambda p, b: 0.0, ArgumentTypeError, r"called as loss_fn\(params, batch, d"),
    "no function": (3, ArgumentTypeError, "must be a function"),
    "no scalar": (
        lambda p, b, d: p["w"].astype(d),
        ArgumentError,
        r"shape \(6, 5\). Take the mean",
    ),
    "a pair": (lambda p, b, d: (dense, 1), ArgumentTypeError, "say has_aux=True"),
    "nothing": (lambda p, b, d: None, ArgumentTypeError, "a NoneType"),
    "whole numbers": (lambda p, b, d: 3, ArgumentError, "dtype int32"),
    "float32 always": (
        lambda p, b, d: mean_square(b @ p["w"]),
        ArgumentError,
        "computes nothing in float16 when dtype is float16",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loss_that_cannot_be_used_is_named(mistake):
    loss_fn, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        diagnose(loss_fn, {"w": drawn(6, 5)}, [X])


def test_other_mistakes_have_one_sentence():
    loss_fn, params, _ = LOSSES["own derivative"]
    for batches in (X, (X, X), {"x": X}, 3):
        with pytest.raises(ArgumentTypeError, match=r"one batch is \[batch\]"):
            diagnose(loss_fn, params, batches)
    with pytest.raises(ArgumentError, match="There is no batch in `batches`"):
        diagnose(loss_fn, params, [])
    with pytest.raises(ArgumentError, match="nothing to train in `params`"):
        diagnose(lambda p, b, d: jnp.float32(1), {"n": np.arange(3)}, [X])
    with pytest.raises(ArgumentTypeError, match="must return a pair"):
        diagnose(loss_fn, params, [X], has_aux=True)
    with pytest.raises(ArgumentError, match="`in_use` must be"):
        diagnose(loss_fn, params, [X], in_use=0)


def test_what_float16_cannot_run_is_unknown_and_says_why():
    def loss_fn(params, batch, dtype):
        if dtype == jnp.float16:
            raise NotImplementedError("no kernel for float16")
        return mean_square(batch @ params["w"])

    report = diagnose(loss_fn, {"w": drawn(6, 5)}, [X])
    assert report.verdict == "unknown"
    assert "does not run in float16 here: no kernel" in str(report)


def test_what_comes_with_a_loss_may_be_anything():
    loss_fn, params, batches = LOSSES["own derivative"]
    report = diagnose(
        lambda p, b, d: (loss_fn(p, b, d), {"n": b.sum()}), params, batches, has_aux=True
    )
    assert (
        report.measurements[LOSS].gradients
        == diagnose(loss_fn, params, batches).measurements[LOSS].gradients
    )

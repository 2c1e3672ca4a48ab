"""Passes of a loss in JAX: every number beside one that is computed by hand; and its report."""

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
from lossscale.diagnosis.gradient_function import LOSS
from lossscale.diagnosis.jax import JaxGradientFunction
from lossscale.diagnosis.verdict import Verdict
from lossscale.errors import ArgumentError, ArgumentTypeError

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


LOSSES = {
    "dense": (dense, (drawn(6, 8), drawn(8, 3)), [X, X + 1]),
    "embedding, shared": (embedded, {"table": drawn(5, 4), "kernel": drawn(4, 4)}, [TOKENS]),
    "recurrent": (recurrent, {"inner": drawn(6, 6)}, [X]),
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
    for half, scale, watch in [
        (False, 1, False),
        (False, 1, True),
        (True, 1, True),
        (True, 64, False),
    ]:
        dtype = jnp.float16 if half else jnp.float32
        found = run(batches[0], scale, half, watch=watch)[LOSS]
        wanted = by_hand(loss_fn, params, batches[0], scale, dtype)
        # A pass that is watched fuses other operations.
        close = 2e-2 if half and watch else 1e-5
        for gradient, expected in zip(found.gradients.values(), wanted, strict=True):
            assert gradient.dtype == np.float32
            largest = np.abs(expected).max()
            np.testing.assert_allclose(gradient, expected, rtol=close, atol=close * largest + 6e-8)
        value = loss_fn(jax.tree.map(jnp.asarray, params), batches[0], dtype)
        assert found.loss == pytest.approx(float(value), rel=1e-2)
        assert bool(found.outputs) == watch
    report = diagnose(loss_fn, params, batches)
    assert report.verdict is Verdict.NEEDED
    last = by_hand(loss_fn, params, batches[0], report.rule.initial_scale, jnp.float16)
    assert all(np.isfinite(gradient).all() for gradient in last)
    assert bits((params, batches)) == before


def test_an_overflow_is_found_where_it_is():
    def loss_fn(params, batch, dtype):
        hidden = batch["x"].astype(dtype) @ params["w"].astype(dtype)
        large = hidden * batch["factor"].astype(dtype)
        small = jax.checkpoint(lambda x: jnp.tanh(x / batch["factor"].astype(dtype)))(large)
        return mean_square(small)

    params = {"w": drawn(6, 5)}
    run, batch = JaxGradientFunction(params, loss_fn), {"x": X, "factor": np.float32(3e4)}
    wide, narrow = (run(batch, 1.0, half, watch=True)[LOSS].outputs for half in (False, True))
    hidden = X @ params["w"]
    wanted = {"dot_general": hidden, "mul": hidden * 3e4, "div": hidden, "tanh": np.tanh(hidden)}
    names = list(narrow)
    assert list(wide)[: len(names)] == names
    assert [name.partition("(")[2].rstrip(")") for name in names] == list(wanted)
    assert all("loss_fn" in name and ", line " in name for name in names)
    for name, array in zip(names, wanted.values(), strict=True):
        assert wide[name].finite
        assert wide[name].largest == pytest.approx(np.abs(array).max(), rel=1e-5)
    finite = [narrow[name].finite for name in names]
    assert finite == [True, False, False, True]
    kept = np.abs(np.float16(hidden) * np.float32(3e4))
    assert narrow[names[1]].largest == pytest.approx(kept[kept < 65520].max(), rel=2e-3)
    report = diagnose(loss_fn, params, [batch])
    assert report.verdict is Verdict.CANNOT_HELP
    assert names[1] in " ".join(str(report).split())


@pytest.mark.parametrize("transformed", ["jit", "checkpoint", "vmap", "grad", "scan", "print"])
def test_operations_are_named_within_what_jax_transforms(transformed):
    def layer(x, w):
        if transformed == "print":
            jax.debug.print("seen {}", x[0, 0])
        return jnp.tanh(x @ w)

    def loss_fn(params, batch, dtype):
        x, w = batch.astype(dtype), params["w"].astype(dtype)
        if transformed == "vmap":
            return mean_square(jax.vmap(lambda row: layer(row[None], w))(x))
        if transformed == "grad":
            return mean_square(jax.grad(lambda x: layer(x, w).sum())(x))
        if transformed == "scan":
            return mean_square(jax.lax.scan(lambda c, row: (c, layer(row[None], w)), 0, x)[1])
        return mean_square(getattr(jax, transformed, lambda f: f)(layer)(x, w))

    params = {"w": drawn(6, 5)}
    run = JaxGradientFunction(params, loss_fn)
    wide, narrow = (run(X, 1.0, half, watch=True)[LOSS].outputs for half in (False, True))
    assert set(narrow) <= set(wide)
    # A loop is one operation.
    assert any(
        name.endswith("(scan)" if transformed == "scan" else "(dot_general)") for name in narrow
    )
    assert diagnose(loss_fn, params, [X]).verdict is Verdict.NEEDED
    overflows = diagnose(loss_fn, params, [X * 1e5]).verdict
    assert overflows is Verdict.CANNOT_HELP


def test_losses_in_a_dictionary_are_judged_by_what_each_one_owns():
    params = {"critic": {"w": drawn(6, 5)}, "actor": {"w": drawn(5, 6).T}, "actors": drawn(3)}

    def loss_fn(params, batch, dtype):
        def head(name):
            return mean_square(batch.astype(dtype) @ params[name]["w"].astype(dtype))

        return {"critic": head("critic"), "actor": head("actor") / LOSES + head("critic") * 0}

    owned = {"critic": ["critic"], "actor": ["actor/w"]}
    run = JaxGradientFunction(params, loss_fn, owned)
    for half, watch in [(False, True), (True, True), (True, False)]:
        dtype = jnp.float16 if half else jnp.float32
        found = run(X, 1.0, half, watch=watch)
        assert {name: list(each.gradients) for name, each in found.items()} == {
            "critic": ["critic/w"],
            "actor": ["actor/w"],
        }
        for name in owned:
            wanted = by_hand(lambda p, b, d, n=name: loss_fn(p, b, d)[n], params, X, 1.0, dtype)
            index = {"actor": 0, "critic": 2}[name]
            gradient = found[name].gradients[f"{name}/w"]
            np.testing.assert_allclose(gradient, wanted[index], rtol=2e-2, atol=6e-8)
    report = diagnose(loss_fn, params, [X], parameters=owned)
    assert "loss_fn, critic: " in str(report)
    with pytest.raises(ArgumentError, match="The loss 'critic' depends on no trainable parameter"):
        diagnose(loss_fn, params, [X], parameters={"critic": ["nobody"]})
    with pytest.raises(
        ArgumentError, match=r"losses that `loss_fn` returns: 'critic', .*Received: 'kritic'"
    ):
        diagnose(loss_fn, params, [X], parameters={"kritic": ["critic"]})
    with pytest.raises(ArgumentTypeError, match=r"Received: 'critic'; write \['critic'\]"):
        diagnose(loss_fn, params, [X], parameters={"critic": "critic"})


def test_what_is_no_number_to_train_has_no_gradient():
    def loss_fn(params, batch, dtype):
        return mean_square(batch.astype(dtype) @ params["w"].astype(dtype)) * params["n"][0]

    params = {"w": drawn(6, 5), "n": np.array([2]), "key": jax.random.key(0)}
    found = JaxGradientFunction(params, loss_fn)(X, 1.0, True, watch=True)[LOSS]
    assert list(found.gradients) == ["w"]


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
        "nnx": diagnose(nnx_loss, model, [X]),
        "haiku": diagnose(haiku_loss, network.init(jax.random.key(0), X), [X]),
        "equinox": diagnose(equinox_loss, linear, [X]),
    }
    assert (bits(nnx.state(model)), model.layers[0].dtype) == before
    names = {kind: list(report.measurements[LOSS].gradients) for kind, report in reports.items()}
    assert {kind: {each.name for each in found} for kind, found in names.items()} == {
        "linen": {"params/Dense_0/bias", "params/Dense_0/kernel"},
        "nnx": {"layers/0/bias", "layers/0/kernel"},
        "haiku": {"linear/b", "linear/w"},
        "equinox": {"bias", "weight"},
    }
    assert all(report.verdict is Verdict.NEEDED for report in reports.values())
    operations = {kind: report.measurements[LOSS].operations for kind, report in reports.items()}
    assert all(operations.values())
    assert any("Dense_0" in name for name in operations["linen"])


MISTAKES = {
    "two arguments": (lambda p, b: 0.0, ArgumentTypeError, r"the call loss_fn\(params, batch, d"),
    "no function": (3, ArgumentTypeError, "must accept the call"),
    "no scalar": (
        lambda p, b, d: p["w"].astype(d),
        ArgumentError,
        r"shape \(6, 5\) .*Take the mean",
    ),
    "a pair": (lambda p, b, d: (dense, 1), ArgumentTypeError, "Return the loss alone"),
    "nothing": (lambda p, b, d: None, ArgumentTypeError, "a NoneType"),
    "a number": (lambda p, b, d: 3, ArgumentTypeError, "a int"),
    "whole numbers": (lambda p, b, d: jnp.int32(3), ArgumentError, "dtype int32"),
    "float16 always": (
        lambda p, b, d: mean_square(b.astype(jnp.float16) @ p["w"].astype(jnp.float16)),
        ArgumentError,
        "computes in float16 when dtype is float32",
    ),
    "float16 in one layer": (
        lambda p, b, d: mean_square((b.astype(d) @ p["w"].astype(d)).astype(jnp.float16)),
        ArgumentError,
        "computes in float16 when dtype is float32",
    ),
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
    with pytest.raises(ArgumentError, match="`batches` must contain at least one batch"):
        diagnose(loss_fn, params, [])
    with pytest.raises(ArgumentError, match="depends on no trainable parameter"):
        diagnose(lambda p, b, d: jnp.float32(1), {"n": np.arange(3)}, [X])
    with pytest.raises(ArgumentError, match="`tolerance` must be"):
        diagnose(loss_fn, params, [X], tolerance=2)


def test_what_float16_cannot_run_is_unknown_and_says_why():
    def loss_fn(params, batch, dtype):
        if dtype == jnp.float16:
            raise NotImplementedError("no kernel for float16")
        return mean_square(batch @ params["w"])

    report = diagnose(loss_fn, {"w": drawn(6, 5)}, [X])
    assert report.verdict is Verdict.UNKNOWN
    assert "does not run in float16 here: no kernel" in " ".join(str(report).split())

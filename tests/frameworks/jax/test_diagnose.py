"""The report on a loss in JAX: every number beside one that is computed by hand."""

import functools

import equinox as eqx
import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import lossscale.optax
from frameworks.jax.support import bits
from lossscale.diagnostics import GradientReport, Verdict
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
def test_what_float16_makes_of_each_gradient_is_what_a_training_step_makes_of_it(kind):
    loss_fn, params, batches = LOSSES[kind]
    before = bits((params, batches))
    fidelity = diagnose(loss_fn, params, batches, in_use=64).fidelity
    assert bits((params, batches)) == before
    assert fidelity.missing == ""
    assert (fidelity.reference_scale == 1) == (kind != "casts by itself")
    reference_scale = fidelity.reference_scale
    for scale in (1.0, fidelity.good, 64.0):
        both = []
        for batch in batches:
            g = by_hand(loss_fn, params, batch, reference_scale, jnp.float32)
            h = by_hand(loss_fn, params, batch, scale, jnp.float16)
            both.append([(a / reference_scale, b / scale) for a, b in zip(g, h, strict=True)])
        for variable, pairs in zip(fidelity.variables, zip(*both, strict=True), strict=True):
            g, h = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
            lost = np.abs(g)[h == 0].sum() / np.abs(g).sum()
            error = np.linalg.norm(h - g) / np.linalg.norm(g)
            found = variable.at[scale]
            assert (found.lost, found.error) == pytest.approx((lost, error), rel=1e-4)
    # Every loss of these loses something that a scale mends.
    judged = fidelity.judge()
    assert judged.verdict in (Verdict.REQUIRED, Verdict.RECOMMENDED)
    last = [by_hand(loss_fn, params, batches[0], fidelity.highest * f, jnp.float16) for f in (1, 2)]
    finite = [all(np.isfinite(h).all() for h in gradients) for gradients in last]
    assert finite == [True, False]


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
    names = {kind: {v.name for v in report.fidelity.variables} for kind, report in reports.items()}
    assert names == {
        "linen": {"params/Dense_0/bias", "params/Dense_0/kernel"},
        "nnx": {"layers/0/bias", "layers/0/kernel"},
        "haiku": {"linear/b", "linear/w"},
        "equinox": {"bias", "weight"},
    }
    assert all(report.recommended_scale > 1 for report in reports.values())
    layers = {v.layer for v in reports["linen"].fidelity.variables}
    assert layers == {"params/Dense_0"}


def test_what_the_loss_has_named_is_looked_at_inside():
    first, second = drawn(6, 8), drawn(8, 3)

    def loss_fn(params, batch, dtype):
        @jax.checkpoint
        def hidden(x):
            return checkpoint_name(jnp.tanh(x @ params["first"].astype(dtype)), "block/hidden")

        outputs = jax.jit(lambda x: x @ params["second"].astype(dtype))(hidden(batch.astype(dtype)))
        steps, _ = jax.lax.scan(
            lambda x, _: (checkpoint_name(x * 1, "step"), None), outputs, length=2
        )
        checkpoint_name(batch.sum().astype(jnp.int32), "number")
        return mean_square(checkpoint_name(checkpoint_name(steps, "outputs"), "outputs"))

    report = diagnose(loss_fn, {"first": first, "second": second}, [X])
    inside = {found.name: found for found in report.ranges if found.name.startswith("activation:")}
    assert set(inside) == {
        "activation:block/hidden",
        "activation:outputs",
        "activation:outputs#2",
    }
    hidden = np.tanh(X @ first)
    by_outputs = 2 * (hidden @ second) / 36 * LOSES
    wanted = {"block/hidden": by_outputs @ second.T, "outputs": by_outputs}
    for name, gradient in wanted.items():
        found = inside[f"activation:{name}"].histogram
        assert found.size == gradient.size
        assert found.amax == pytest.approx(np.abs(gradient).max(), rel=1e-5)
    assert inside["activation:block/hidden"].layer == "block/hidden"
    assert "Not looked into: step. What is named in a loop" in str(report)
    assert {v.name for v in report.fidelity.variables} == {"first", "second"}


def test_a_report_says_that_nothing_was_looked_at_inside():
    loss_fn, params, batches = LOSSES["own derivative"]
    for quick in (True, False):
        text = str(diagnose(loss_fn, params, batches, quick=quick))
        assert "Only gradients by the parameters were looked at" in text
        assert 'checkpoint_name(x, "x")' in text


def test_the_report_reads_as_those_of_other_frameworks():
    loss_fn, params, batches = LOSSES["dense"]
    report = diagnose(loss_fn, params, batches)
    text = str(report)
    assert text.startswith("Loss scaling for dense in float16: re")
    assert "with JAX on cpu" in text
    assert "by the loss function with dtype=float16" in text
    assert (report.batches, report.samples) == (2, 24)
    assert GradientReport.from_json(report.to_json()) == report


def test_quick_compiles_the_reference_alone_and_predicts():
    loss_fn, params, batches = LOSSES["dense"]
    dtypes = []

    def noted(params, batch, dtype):
        dtypes.append(np.dtype(dtype).name)
        return loss_fn(params, batch, dtype)

    report = diagnose(noted, params, batches, quick=True, max_batches=1)
    assert report.fidelity is None
    assert report.batches == 1
    # In float16 it is only looked at.
    assert dtypes == ["float32", "float16"]
    assert "bfloat16" in str(diagnose(loss_fn, params, batches, format="bfloat16"))


def test_the_scale_of_an_optimizer_is_measured_as_well():
    loss_fn, params, batches = LOSSES["own derivative"]
    import optax

    tx = lossscale.optax.loss_scaled(optax.sgd(0.1), initial_scale=32)
    report = diagnose(loss_fn, params, batches, in_use=tx.init(params))
    assert report.fidelity.in_use == 32.0


def test_float64_is_a_reference_where_there_are_such_numbers():
    loss_fn, params, batches = LOSSES["own derivative"]
    with pytest.raises(ArgumentError, match="jax_enable_x64"):
        diagnose(loss_fn, params, batches, reference="float64")
    with jax.enable_x64(True):
        report = diagnose(loss_fn, params, batches, reference="float64")
        assert report.measured_in == "float64"
        assert report.ranges[0].histogram.mass > 0


@pytest.mark.parametrize("reference", ["float16", None])
def test_no_other_reference_is_taken(reference):
    with pytest.raises(ArgumentError, match="'float32' or 'float64'"):
        diagnose(*LOSSES["dense"], reference=reference)


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
    assert report.verdict is Verdict.UNKNOWN
    assert "does not run in float16 here: no kernel" in report.reason


def test_what_comes_with_a_loss_may_be_anything():
    loss_fn, params, batches = LOSSES["own derivative"]
    report = diagnose(
        lambda p, b, d: (loss_fn(p, b, d), {"n": b.sum()}), params, batches, has_aux=True
    )
    assert report.fidelity.variables == diagnose(loss_fn, params, batches).fidelity.variables

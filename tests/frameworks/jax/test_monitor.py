"""The monitor of loops with Optax, and what a step tracks for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lossscale
import lossscale.optax
from frameworks.jax.support import bits
from lossscale.errors import ArgumentError, ArgumentTypeError

RULE = lossscale.DynamicScale(initial_scale=8, growth_interval=4)
PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
BARE = lossscale.optax.loss_scaled(optax.adam(0.1), rule=RULE)
TRACKED = lossscale.optax.loss_scaled(optax.adam(0.1), rule=RULE, track_overflows=True)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def step(tx, params, opt_state, spoiled):
    """A step whose gradients are all 2.0 but for one of the kernel."""
    grads = jax.tree.map(
        lambda p: jnp.full_like(p, 2.0) * lossscale.optax.loss_scale(opt_state), params
    )
    grads["dense"]["kernel"] = grads["dense"]["kernel"].at[0, 0].multiply(spoiled)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.float32(0.5)


def start(tx):
    params = jax.tree.map(jnp.copy, PARAMS)
    return params, tx.init(params)


def test_nothing_is_read_of_steps_that_are_not_sampled():
    params, opt_state = start(TRACKED)
    monitor = lossscale.optax.Monitor(TRACKED, PARAMS, opt_state, every=1000)
    for number in range(3):
        params, opt_state, loss = step(TRACKED, params, opt_state, 1.0)
        with jax.transfer_guard_device_to_host("disallow" if number else "allow"):
            monitor.step(opt_state, loss)
    assert monitor.last_record.step == 1
    monitor.close()
    assert monitor.last_record.step == 3


def test_a_last_step_whose_buffers_are_gone_is_left_out():
    params, opt_state = start(TRACKED)
    monitor = lossscale.optax.Monitor(TRACKED, PARAMS, opt_state, every=1000)
    for _ in range(2):
        params, opt_state, _ = step(TRACKED, params, opt_state, 1.0)
        monitor.step(opt_state)
    step(TRACKED, params, opt_state, 1.0)
    monitor.close()
    assert monitor.last_record.step == 1


def test_several_steps_in_one_call():
    @jax.jit
    def steps(params, opt_state, spoiled):
        def one(carry, factor):
            grads = jax.tree.map(lambda p: jnp.full_like(p, 8.0) * factor, carry[0])
            updates, opt_state = TRACKED.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), opt_state), None

        return jax.lax.scan(one, (params, opt_state), spoiled)[0]

    params, opt_state = start(TRACKED)
    with lossscale.optax.Monitor(TRACKED, PARAMS, opt_state) as monitor:
        params, opt_state = steps(params, opt_state, jnp.float32([1, jnp.inf, 1]))
        monitor.step(opt_state, steps=3)
    assert (monitor.last_record.step, monitor.last_record.scale) == (3, 4)
    assert monitor.last_record.steps_skipped == 1


def test_an_nnx_optimizer_is_watched():
    @nnx.jit
    def train_step(model, optimizer, x):
        value_and_grad = lossscale.optax.value_and_grad(
            lambda m: jnp.mean(m(x).astype(jnp.float32) ** 2), grad=nnx.value_and_grad
        )
        loss, grads = value_and_grad(optimizer, model)
        optimizer.update(model, grads)
        return loss

    model = nnx.Linear(4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TRACKED, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    with lossscale.optax.Monitor(TRACKED, params, optimizer) as monitor:
        loss = train_step(model, optimizer, jnp.full((2, 4), 2.0**13))
        monitor.step(optimizer, loss)
    record = monitor.last_record
    assert record.reason == "overflow"
    assert [tensor.name for tensor in record.nonfinite] == ["bias", "kernel"]


@pytest.mark.usefixtures("optimized")
def test_what_the_optimizer_does_is_the_same():
    # The tests above have compiled it quickly.
    step.clear_cache()
    runs = []
    for tx in (BARE, TRACKED):
        params, opt_state = start(tx)
        for spoiled in (1.0, jnp.inf, 1.0, jnp.nan, 1.0):
            params, opt_state, _ = step(tx, params, opt_state, spoiled)
        runs.append(bits((params, opt_state._replace(tracked=None))))
    assert runs[0] == runs[1]
    assert int(opt_state.tracked.iterations) == 5
    tracked = opt_state.tracked.steps
    assert (int(tracked.skip_step), float(tracked.scales[1])) == (4, 4)
    # One NaN in the first row of the leaves in order: the bias, then the kernel.
    np.testing.assert_array_equal(tracked.nonfinite, [[0, 0], [0, 1]])
    # A state that tracked nothing so far goes in.
    without = BARE.init(PARAMS)._replace(tracked=TRACKED.init(PARAMS).tracked)
    step(TRACKED, jax.tree.map(jnp.copy, PARAMS), without, 1.0)


def test_what_cannot_be_tracked_is_refused():
    inner = optax.lookahead(optax.adam(0.01), 5, 0.1)
    lookahead = lossscale.optax.loss_scaled(inner, track_overflows=True)
    pair = optax.LookaheadParams.init_synced(PARAMS)
    for tx, first, gradients, message in (
        (
            TRACKED,
            BARE.init(PARAMS),
            PARAMS,
            r"track 2\. .* tracks none.*_replace\(tracked=tx\.init",
        ),
        (BARE, TRACKED.init(PARAMS), PARAMS, "=False .* the state must track none.* tracks 2"),
        (TRACKED, TRACKED.init(PARAMS), {"w": jnp.ones(2)}, r"must track 1\..* tracks 2"),
        (lookahead, lookahead.init(pair), PARAMS, r"must track 2\..* tracks 4"),
    ):
        for update in (tx.update, jax.jit(tx.update)):
            with pytest.raises(ArgumentError, match=message):
                update(gradients, first, pair if tx is lookahead else PARAMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tx": optax.adam(0.1)}, "`tx` must be what"),
        ({"opt_state": optax.adam(0.1).init(PARAMS)}, "with loss scaling"),
        ({"params": {"w": jnp.ones(2)}}, "1 trainable arrays, for a state that tracks 2"),
        ({"opt_state": BARE.init(PARAMS)}, r"Write loss_scaled\(\.\.\., track_overflows=True\)"),
    ],
)
def test_a_monitor_checks_its_arguments(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"tx": TRACKED, "params": PARAMS, "opt_state": TRACKED.init(PARAMS), **arguments}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        lossscale.optax.Monitor(**given)
    assert not list(tmp_path.iterdir())


def test_a_monitor_checks_what_it_is_shown(tmp_path):
    opt_state = TRACKED.init(PARAMS)
    monitor = lossscale.optax.Monitor(RULE, PARAMS, opt_state)
    with pytest.raises(ArgumentError, match="`steps`"):
        monitor.step(opt_state, steps=0)
    for again in range(2):
        # The state before the step, of which the caller has not kept the next one.
        with pytest.raises(ArgumentError, match=r"Pass the state that tx\.update"):
            monitor.step(opt_state)
        _, after = TRACKED.update(PARAMS, opt_state, PARAMS)
        monitor.step(after)
        opt_state = after
        assert monitor.last_record.step == again + 1
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lossscale.optax.Monitor(RULE, PARAMS, opt_state).step)(opt_state)
    with pytest.raises(ArgumentTypeError, match="with loss scaling"):
        monitor.step(PARAMS)
    assert monitor.last_record.step == 2
    monitor.close()
    _, after = TRACKED.update(PARAMS, opt_state, PARAMS)
    with pytest.raises(ArgumentError, match="This Monitor is closed"):
        monitor.step(after)
    with pytest.raises(FileNotFoundError):
        lossscale.optax.Monitor(RULE, PARAMS, opt_state, tmp_path / "no" / "folder" / "run.jsonl")


# What a row belongs to goes by places, not by names, which may recur.

BESIDE = {
    "one name": ({"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, "a/b"),
    "a key called value": ({"attn": {"key": jnp.ones(2), "value": jnp.ones(2)}}, "attn/value"),
    "alone and called value": ({"attn": {"value": jnp.ones(2)}}, "attn/value"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_an_overflow_is_put_down_to_its_own_gradient(case):
    params, name = BESIDE[case]
    leaves, structure = jax.tree.flatten(params)
    tx = lossscale.optax.loss_scaled(optax.sgd(0.1), track_overflows=True)
    for row in range(len(leaves)):
        given = [leaf * jnp.inf if n == row else leaf for n, leaf in enumerate(leaves)]
        opt_state = tx.init(params)
        with lossscale.optax.Monitor(tx, params, opt_state) as monitor:
            _, opt_state = tx.update(jax.tree.unflatten(structure, given), opt_state, params)
            monitor.step(opt_state, 1.0)
        assert opt_state.tracked.steps.nonfinite[row].tolist() == [2, 0]
        assert int(opt_state.tracked.steps.nonfinite.sum()) == 2
        if row == len(leaves) - 1:
            assert str(monitor.last_record.nonfinite[0]).startswith(name)

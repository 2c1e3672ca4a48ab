"""float16 parameters with float32 copies train as float32 parameters that a loop rounds."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import StandardCheckpointer

import lossscale.optax
from frameworks.jax import inner_transformations as inner
from frameworks.jax.support import bits, signature
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.optax import loss_scaled, master_weights

INNER = {
    **inner.INNER,
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.01),
    "lion": lambda: optax.lion(0.01),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 6)),
    "accumulated, clipped": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)), 3
    ),
}


def half():
    return {"w": jnp.ones((3, 4), jnp.float16), "b": jnp.ones(4, jnp.float32)}


def rounded(masters, dtypes):
    return {name: jnp.asarray(leaf, dtypes[name]) for name, leaf in masters.items()}


def as_float(array):
    return np.asarray(array).astype(np.float32)


@jax.jit
def scaled_gradients(params, x, factor, scale):
    def loss(params):
        hidden = jnp.tanh(x @ params["w"].astype(jnp.float16) + params["b"].astype(jnp.float16))
        return jnp.mean(hidden.astype(jnp.float32) ** 2) * factor * scale

    return jax.grad(loss)(params)


def random_program(seed):
    """Dtypes, steps (data, a factor of the loss, written values), and whether it is compiled."""
    random = np.random.default_rng(seed)
    kinds = ["float16", "float16", "bfloat16", "float32"]
    dtypes = {n: str(random.choice(kinds)) for n in "wb"}
    steps = []
    for _ in range(8):
        factor = np.float32(random.choice([1.0, 1.0, 1.0, 30.0, 1e-3, np.inf, np.nan]))
        n, x = str(random.choice(["w", "b"])), random.normal(size=(5, 3)).astype(np.float16)
        shape = half()[n].shape
        written = random.random(shape) < random.choice([0.0, 0.0, 0.4]), random.normal(size=shape)
        steps.append((x, factor, n, *written))
    return dtypes, steps, bool(random.random() < 0.5)


def difference(name, seed):
    """The largest difference of parameters and copies, in units of float32's spacing; 0 if none."""
    dtypes, steps, compiled = random_program(seed)

    def stepper(tx):
        def step(params, state, gradients):
            extra = inner.extra_args(name, jnp.float32(1.0))
            updates, state = tx.update(gradients, state, params, **extra)
            return optax.apply_updates(params, updates), state

        return jax.jit(step) if compiled else step

    alone, most, scale = INNER[name](), 0.0, 2.0**10
    tx = loss_scaled(master_weights(INNER[name]()), initial_scale=scale)
    params = rounded(inner.params(), dtypes)
    masters = rounded(params, dict.fromkeys(params, "float32"))
    state, of_hand = tx.init(params), alone.init(masters)
    step, step_of_hand = stepper(tx), stepper(alone)
    for x, factor, n, where, values in steps:
        values = jnp.asarray(values, dtypes[n])
        params = {**params, n: jnp.where(where, values, params[n])}
        new = where & (values != masters[n].astype(dtypes[n]))
        masters = {**masters, n: jnp.where(new, values.astype(jnp.float32), masters[n])}
        gradients = scaled_gradients(params, x, factor, state.loss_scale)
        params, state = step(params, state, gradients)
        gradients = scaled_gradients(rounded(masters, dtypes), x, factor, scale)
        gradients = {n: leaf.astype(jnp.float32) / scale for n, leaf in gradients.items()}
        if all(np.isfinite(leaf).all() for leaf in gradients.values()):
            masters, of_hand = step_of_hand(masters, of_hand, gradients)
        else:
            scale /= 2
        pairs = [(rounded(masters, dtypes)[n], params[n]) for n in dtypes]
        if not state.last_step_skipped:  # What was written replaces copies at an applied step.
            narrow = [n for n in dtypes if dtypes[n] != "float32"]
            pairs += [(masters[n], state.inner_state.masters[n]) for n in narrow]
        assert float(state.loss_scale) == scale
        for a, b in pairs:
            assert (a.dtype, np.isfinite(a).all(), np.isfinite(b).all()) == (b.dtype, True, True)
            unit = np.spacing(np.float32(np.abs(as_float(a)).max()))
            most = max(most, float(np.abs(as_float(a) - as_float(b)).max() / unit))
    return most


# One for each kind of transformation, out of 320 whose largest difference is 2.
PROGRAMS = {
    "sgd": 27,
    "momentum": 160,
    "adam": 92,
    "adamw_clip": 65,
    "lion": 61,
    "adafactor": 131,
    "masked": 6,
    "multi_transform": 135,
    "freezing": 168,
    "schedule": 62,
    "inject_hyperparams": 37,
    "apply_if_finite": 11,
    "accumulated, clipped": 95,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_random_program_trains_as_float32_parameters_that_a_loop_rounds(name):
    seed = PROGRAMS[name]
    # XLA rounds two programs differently; operations that are dispatched one by one are the same.
    assert difference(name, seed) <= (2.0 if random_program(seed)[2] else 0.0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_whatever_the_bits_a_parameter_becomes_its_rounded_copy(dtype):
    every, random = np.arange(2**16, dtype=np.uint16), np.random.default_rng(0)
    before, wanted = (random.permutation(every).view(dtype) for _ in range(2))
    if dtype == jnp.bfloat16:  # XLA takes float32 numbers this small for 0, here and elsewhere.
        large = [np.abs(as_float(array)) > 1e-30 for array in (before, wanted)]
        before, wanted = before[large[0] & large[1]], wanted[large[0] & large[1]]
    tx, params, copies = master_weights(optax.sgd(1.0)), jnp.asarray(before), as_float(before)
    with np.errstate(all="ignore"):
        # Fractions that round away.
        copies = np.where(np.isfinite(copies), copies * np.float32(1 + 2**-14), copies)
        # Those of -1e-9 are -0.0 in float16, which a sum of other numbers never is.
        targets = np.where(np.arange(len(before)) % 16, as_float(wanted), np.float32(-1e-9))
        gradients = copies - targets
        exact = copies - gradients
        expected = exact.astype(dtype)
    state = tx.init(params)._replace(masters=jnp.asarray(copies))
    for update in (tx.update, jax.jit(tx.update)):
        updates, after = update(jnp.asarray(gradients), state, params)
        found = np.asarray(optax.apply_updates(params, updates))
        np.testing.assert_array_equal(as_float(found), as_float(expected))
        np.testing.assert_array_equal(np.asarray(after.masters), exact)
        _, again = update(jnp.zeros(len(before)), after, jnp.asarray(found))
        np.testing.assert_array_equal(np.asarray(again.masters), exact)
        # A sum is -0.0 only if both numbers are.
        becomes = (expected.view(np.uint16) == 2**15) & (before.view(np.uint16) == 2**15)
        np.testing.assert_array_equal(found.view(np.uint16) == 2**15, becomes)


@pytest.mark.parametrize(("dtype", "compiled"), [(jnp.float16, True), (jnp.bfloat16, False)])
def test_what_is_written_is_kept_to_the_bit_and_so_are_the_other_copies(dtype, compiled):
    written = jnp.asarray([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, 2.0**-24], dtype)
    tx = loss_scaled(master_weights(optax.sgd(1.0)))
    copies = jnp.linspace(-1, 1, 2 * len(written), dtype=jnp.float32) / 3
    params, update = copies.astype(dtype), jax.jit(tx.update) if compiled else tx.update
    state = tx.init(params)
    state = state._replace(inner_state=state.inner_state._replace(masters=copies))
    params = params.at[::2].set(written)
    updates, skipped = update(jnp.full_like(params, jnp.inf), state, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    updates, after = update(jnp.zeros_like(params), skipped, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    expected = copies.at[::2].set(written.astype(jnp.float32))
    assert bits(after.inner_state.masters) == bits(expected)
    assert signature(after) == signature(state)


ADAM, MASK, LABELS, ZERO = optax.adam(0.1), inner.MASK, inner.LABELS, optax.set_to_zero()
COPIES, LORA = master_weights(ADAM), {"w": False, "b": True}


def test_what_cannot_be_used_is_refused_before_anything_changes():
    with pytest.raises(ArgumentTypeError, match="must be an Optax transformation"):
        master_weights(optax.adam)
    with pytest.raises(ArgumentTypeError, match=r"tx\.update\(grads, state, params\)"):
        COPIES.update(half(), COPIES.init(half()))
    for wrong in (master_weights(COPIES), master_weights(loss_scaled(ADAM))):
        with pytest.raises(ArgumentError, match=r"inside.*Write loss_scaled\(master_weights\("):
            loss_scaled(wrong).init(half())
    # What `equinox.apply_updates` makes of them: it adds, and does not round.
    for before, after in ((half(), inner.params()), (inner.params(), half())):
        with pytest.raises(ArgumentError, match=r"dtypes.*optax\.apply_updates"):
            COPIES.update(half(), COPIES.init(before), after)


NARROWEST = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn"]


@pytest.mark.parametrize("dtype", NARROWEST)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_quantized_base_is_updated_as_without_copies(dtype, frozen):
    inner_tx = optax.partition(
        {"adapter": optax.adamw(0.01), "base": ZERO if frozen else optax.sgd(0.5)},
        {"w": "adapter", "b": "base"},
    )
    # None of the numbers is lost in any of the dtypes.
    params = {"w": jnp.ones(4, jnp.bfloat16), "b": jnp.asarray([1, 2, -0.5, 0], dtype)}
    gradients = {"w": jnp.ones(4, jnp.bfloat16), "b": jnp.asarray([1, 2, -1, 0], dtype)}
    tx = loss_scaled(master_weights(inner_tx), initial_scale=1.0)
    without = loss_scaled(inner_tx, initial_scale=1.0)
    for transformation, compiled in itertools.product((tx, without), (False, True)):
        update = jax.jit(transformation.update) if compiled else transformation.update
        state = transformation.init(params)
        updates, after = update(gradients, state, params)
        found = optax.apply_updates(params, updates)
        assert signature((found, after)) == signature((params, state))
        wanted = [1, 2, -0.5, 0] if frozen else [0.5, 1, 0, 0]
        assert found["b"].astype(jnp.float32).tolist() == wanted
    assert isinstance(tx.init(params).inner_state.masters["b"], optax.MaskedNode)


def one_step(tx, params, state, factors):
    updates, state = tx.update(params * factors[0], state, params)
    return optax.apply_updates(params, updates), state


def several_steps(tx, params, state, factors):
    return jax.lax.scan(lambda c, f: (one_step(tx, *c, f[None]), None), (params, state), factors)[0]


@pytest.mark.parametrize("steps", [one_step, several_steps, jax.jit(one_step, static_argnums=0)])
@pytest.mark.parametrize("wrap", [master_weights, lambda tx: loss_scaled(master_weights(tx))])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", ["masters", None])
def test_an_update_cannot_be_differentiated(name, place, wrap, steps):
    """With respect to the start, as in MAML; the learning rate; or the gradients."""
    given = jnp.ones(2, jnp.bfloat16), jnp.float32(0.5), jnp.float32([1.0, 0.5])
    outside = wrap(optax.sgd(0.5)).init(given[0])

    def result(start, rate, factors):
        params, state = steps(wrap(optax.sgd(rate)), start, outside, factors)
        return (optax.tree.get(state, name) if name else params).astype(jnp.float32).sum()

    for derive in (jax.grad(result, place), jax.jit(jax.grad(result, place))):
        with pytest.raises(UnsupportedError, match=r"master_weights cannot .* in float32"):
            derive(*given)


WARNS = [
    *((tx, half()) for tx in (ADAM, optax.sgd(0.1), optax.masked(ADAM, MASK))),
    (optax.partition({"matrix": ADAM, "vector": ZERO}, LABELS), half()),
    (optax.MultiSteps(ADAM, 2), half()),
]
SILENT = [
    # The float16 ones are frozen, or they may be.
    (optax.partition({"matrix": ZERO, "vector": ADAM}, LABELS), half()),
    (optax.masked(ADAM, LORA), half()),
    (optax.chain(optax.masked(ADAM, LORA), optax.masked(ZERO, MASK)), half()),
    (optax.chain(ADAM, optax.masked(ZERO, MASK)), half()),
    (optax.adamw(0.1, mask=MASK), half()),
    (ADAM, {**half(), "w": optax.MaskedNode()}),
    (COPIES, half()),
    (ADAM, inner.params()),
]


@pytest.mark.parametrize("case", range(len(WARNS) + len(SILENT)))
def test_float16_parameters_that_are_rounded_are_named_once(case, recwarn):
    tx, params = [*WARNS, *SILENT][case]
    tx = loss_scaled(tx)
    for init in (tx.init, lambda params: jax.eval_shape(tx.init, params)):
        init(params)
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == (case < len(WARNS))
    assert all("loss_scaled(master_weights(tx))" in message for message in messages)


def test_a_loop_that_donates_skips_and_is_resumed_from_a_file(tmp_path):
    tx = loss_scaled(master_weights(optax.adamw(1e-4)), track_overflows=True)

    def step(carry, factor):
        params, state = carry
        _, gradients = lossscale.optax.value_and_grad(
            lambda p: (
                factor * sum(jnp.sum(jnp.cos(leaf.astype(jnp.float32))) for leaf in p.values())
            )
        )(state, params)
        updates, after = tx.update(gradients, state, params)
        kept = lossscale.optax.unless_skipped(after, factor, 0.0)
        return (optax.apply_updates(params, updates), after), kept

    factors, start = jnp.asarray([1e-3, np.inf, 1e-3]), (half(), tx.init(half()))
    first = jax.tree.map(jnp.copy, start)
    looped, kept = jax.jit(lambda c: jax.lax.scan(step, c, factors), donate_argnums=0)(first)
    assert signature(looped) == signature(start)
    carry, one = start, jax.jit(step, donate_argnums=0)
    with lossscale.optax.Monitor(tx, *start) as monitor, StandardCheckpointer() as files:
        for number, factor in enumerate(factors):
            carry, _ = one(carry, factor)
            monitor.step(carry[1])
            if number == 1:
                files.save(tmp_path / "state", carry[1])
                files.wait_until_finished()
                back = files.restore(tmp_path / "state", jax.eval_shape(tx.init, half()))
                assert bits(back) == bits(carry[1])
                carry = carry[0], back
    assert (monitor.last_record.steps_skipped, np.sign(kept).tolist()) == (1, [1.0, 0.0, 1.0])
    assert bits(carry) == bits(looped)


def test_sharded_parameters_keep_their_shards_and_nothing_is_gathered():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    tx = loss_scaled(master_weights(optax.adamw(1e-3)))
    params = jax.device_put(jnp.ones((8, 16), jnp.float16), place)
    state = tx.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    compiled = step.lower(params, state, params).compile()
    # Only what says whether every device's part is finite.
    assert set(re.findall(r"\[([\d,]*)\]\S* all-gather\(", compiled.as_text())) <= {"4"}
    params, after = compiled(params, state, params)
    for array in (params, state.inner_state.masters, after.inner_state.masters):
        assert array.sharding == place
    doubled = optax.tree.map_params(tx, lambda leaf: 2 * leaf, after)
    assert bits(doubled.inner_state.masters) == bits(2 * after.inner_state.masters)

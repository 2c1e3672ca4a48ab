"""The promises of docs/design.md for the Optax transformation: compiled, step by step, in a scan.

The same rules, gradients and oracle as in tests/conformance, whose harness drives objects.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conformance.recordings import GRADIENTS, VALUES, spoiled
from core import oracle
from core.strategies import dynamic_scales
from frameworks.jax.support import bits
from lossscale import DynamicScale
from lossscale.optax import loss_scaled

MODES = ("jit", "eager", "scan")
RULES = {
    "default": DynamicScale(),
    "reference": DynamicScale(1.0, growth_interval=2),
    "factors": DynamicScale(
        100.0, growth_interval=3, growth_factor=1.7, backoff_factor=0.3, min_scale=0.01
    ),
    "capped": DynamicScale(4.0, growth_interval=1, max_scale=20.0),
}
SEQUENCE = [True, True, True, False, True, True, False, False, False, *[True] * 7, False, True]


def run(mode, tx, steps, state=None):
    """Runs steps whose losses have these gradients; returns parameters, state, and the states."""
    params = [jnp.asarray(value) for value in VALUES]
    state = tx.init(params) if state is None else state

    def step(carry, gradients):
        params, state = carry
        scaled = [gradient * state.loss_scale for gradient in gradients]
        updates, state = tx.update(scaled, state, params)
        return (optax.apply_updates(params, updates), state), state._replace(inner_state=())

    if mode == "scan":
        stacked = [jnp.stack(leaves) for leaves in zip(*steps, strict=True)]
        carry, found = jax.jit(functools.partial(jax.lax.scan, step))((params, state), stacked)
        return *carry, [jax.tree.map(lambda leaf: leaf[i], found) for i in range(len(steps))]  # noqa: B023
    each = jax.jit(step) if mode == "jit" else step
    carry, found = (params, state), []
    for gradients in steps:
        carry, after = each(carry, [jnp.asarray(gradient) for gradient in gradients])
        found.append(after)
    return *carry, found


def gradients_of(finite, number):
    return GRADIENTS if finite else spoiled((np.nan, np.inf, -np.inf)[number % 3], number % 2)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("mode", MODES)
def test_the_scale_follows_the_rule_bit_for_bit(mode, rule):
    tx = loss_scaled(optax.sgd(0.1, momentum=0.9), rule=rule)
    steps = [gradients_of(finite, number) for number, finite in enumerate(SEQUENCE)]
    _, _, found = run(mode, tx, steps)
    expected = oracle.trace(rule, SEQUENCE)
    assert [(float(s.loss_scale), int(s.rule_state["good_steps"])) for s in found] == expected
    skipped = np.cumsum([not finite for finite in SEQUENCE])
    assert [int(s.skipped_steps) for s in found] == skipped.tolist()
    assert [bool(s.last_step_finite) for s in found] == SEQUENCE


@pytest.mark.parametrize("min_scale", [1.0, 2.0**-126])
def test_no_number_of_overflows_takes_the_scale_below_its_floor(min_scale):
    tx = loss_scaled(optax.sgd(0.1), rule=DynamicScale(2.0**15, min_scale=min_scale))
    steps = [spoiled(np.inf)] * int(15 - np.log2(min_scale) + 9)
    _, state, _ = run("scan", tx, steps)
    assert float(state.loss_scale) == min_scale
    params, state, _ = run("scan", tx, [GRADIENTS] * 2, state)
    assert all(jnp.isfinite(value).all() for value in params)


def test_no_number_of_growths_takes_the_scale_above_its_ceiling():
    tx = loss_scaled(optax.sgd(0.1), rule=DynamicScale(2.0**15, growth_interval=1))
    tiny = [gradient * np.float32(2.0**-20) for gradient in GRADIENTS]
    params, state, _ = run("scan", tx, [tiny] * 130)
    assert float(state.loss_scale) == 2.0**126
    assert int(state.skipped_steps) == 0
    assert all(jnp.isfinite(value).all() for value in params)


def test_other_scales_divide_to_within_a_rounding():
    for mode in MODES:
        tx = loss_scaled(optax.sgd(1.0), rule=DynamicScale(3.0, min_scale=3.0))
        zeros = [value * 0 for value in VALUES]
        updates, _ = (jax.jit(tx.update) if mode == "jit" else tx.update)(
            [jnp.full(value.shape, 10.0) for value in VALUES], tx.init(zeros)
        )
        exact = -(np.float32(10) / np.float32(3))
        for update in updates:
            np.testing.assert_array_max_ulp(np.asarray(update), np.full(update.shape, exact), 1)


SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])
TREES = st.recursive(
    st.tuples(SHAPES, DTYPES) | st.none(),
    lambda inside: (
        st.lists(inside, min_size=1, max_size=2)
        | st.dictionaries(st.sampled_from("ab"), inside, min_size=1, max_size=2)
    ),
    max_leaves=4,
)
BAD = st.sampled_from([np.nan, np.inf, -np.inf])


def is_leaf(node):
    return isinstance(node, tuple)


def filled_like(value, leaf):
    return np.full(leaf.shape, value, np.float32)


# Nothing is made smaller: op by op an example takes a second, and they are small as drawn.
@settings(max_examples=25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(tree=TREES, rule=dynamic_scales(), data=st.data())
def test_any_tree_and_any_sequence(tree, rule, data):
    """Op by op, where nothing is rounded otherwise, with bare momentum and the oracle beside it."""
    leaves = jax.tree.leaves(tree, is_leaf=is_leaf)
    sequence = data.draw(st.lists(st.booleans(), min_size=1, max_size=6))

    with jax.disable_jit():
        params = jax.tree.map(lambda leaf: jnp.ones(leaf[0], leaf[1]), tree, is_leaf=is_leaf)
        tx, bare = (
            loss_scaled(optax.sgd(0.5, momentum=0.5), rule=rule),
            optax.sgd(0.5, momentum=0.5),
        )
        state = tx.init(params)
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        plain, plain_params = bare.init(wide), params
        for number, finite in enumerate(sequence):
            scale, before = np.asarray(state.loss_scale), bits((params, state.inner_state))
            half = scale * np.float32(0.5)
            gradients = jax.tree.map(functools.partial(filled_like, half), params)
            if not finite and leaves:
                place = data.draw(st.integers(0, len(leaves) - 1))
                flat, structure = jax.tree.flatten(gradients)
                flat[place].flat[-1] = data.draw(BAD)
                gradients = jax.tree.unflatten(structure, flat)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            if not leaves:
                continue
            expected = oracle.trace(rule, sequence[: number + 1])[-1]
            assert (float(state.loss_scale), int(state.rule_state["good_steps"])) == expected
            if not finite:
                assert bits((params, state.inner_state)) == before
                continue
            exact = half * (1 / scale) if rule.powers_of_two else half / scale
            given_plain = jax.tree.map(functools.partial(filled_like, exact), params)
            updates, plain = bare.update(given_plain, plain, plain_params)
            plain_params = optax.apply_updates(plain_params, updates)
            assert bits(params) == bits(plain_params)
            assert bits(state.inner_state) == bits(plain)

"""The promises of docs/internals/design.md for Optax, on trees and sequences at random.

Case by case the conformance suite has them: the rows optax-native of tests/conformance/wrappers.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from core import oracle
from core.strategies import dynamic_scales
from frameworks.jax.support import bits
from lossscale.optax import loss_scaled, unscale

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
            # XLA may divide by another number than a power of two to within a rounding only.
            exact = functools.partial(filled_like, half * (1 / scale))
            given_plain = (
                jax.tree.map(exact, params) if rule.powers_of_two else unscale(state, gradients)
            )
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            if not leaves:
                continue
            expected = oracle.trace(rule, sequence[: number + 1])[-1]
            assert (float(state.loss_scale), int(state.rule_state["good_steps"])) == expected
            if not finite:
                assert bits((params, state.inner_state)) == before
                continue
            updates, plain = bare.update(given_plain, plain, plain_params)
            plain_params = optax.apply_updates(plain_params, updates)
            assert bits(params) == bits(plain_params)
            assert bits(state.inner_state) == bits(plain)

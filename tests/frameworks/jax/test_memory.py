"""What a step needs beyond the bare optimizer: no room, and no copy of anything large."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.whole_steps import of_optax
from lossscale.optax import loss_scaled

# What a program takes is known once it is optimized.
pytestmark = pytest.mark.usefixtures("optimized")

MEBIBYTE = 2**20
SHAPES = {"one": [(2**20,)], "several": [(2**18,), (256, 1024), (2**15,), (100,), (100,)]}


def compiled(tx, shapes, population=None):
    def step(params, opt_state, gradients):
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    opt_state = jax.eval_shape(tx.init, params)
    if population:
        step = jax.vmap(step)
        params, opt_state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((population, *leaf.shape), leaf.dtype),
            (params, opt_state),
        )
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, params).compile()


def large_copies(program, elements):
    """The copies of arrays of so many elements or more in a compiled program."""
    found = re.findall(r"= \w+\[([\d,]+)\][^=]*? copy\(", program.as_text())
    return [dims for dims in found if np.prod([int(d) for d in dims.split(",")]) >= elements]


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


ADAMW = optax.adamw(1e-3)
COMPILED_BY_ITSELF = optax.GradientTransformation(ADAMW.init, jax.jit(ADAMW.update))


@pytest.mark.parametrize(
    ("inner", "shapes", "population"),
    [(ADAMW, "several", None), (ADAMW, "one", 3), (COMPILED_BY_ITSELF, "one", None)],
)
def test_a_step_needs_no_room_and_copies_nothing(inner, shapes, population):
    bare = compiled(inner, SHAPES[shapes], population)
    ours = compiled(loss_scaled(inner), SHAPES[shapes], population)
    assert temporary(ours) - temporary(bare) <= MEBIBYTE
    assert large_copies(ours, 1000) == []


def test_copies_would_be_seen():
    # What Optax' own wrapper does: the updates of both sides leave a branch.
    theirs = compiled(optax.apply_if_finite(ADAMW, 5), SHAPES["one"])
    assert temporary(theirs) >= 4 * MEBIBYTE


# `python -m benchmarks.whole_steps` has all eighteen.
@pytest.mark.parametrize(
    "row", [("mlp", "mixed_float16", "adam"), ("mlp", "float32", "adam, accumulated")], ids=" ".join
)
def test_a_whole_step_needs_no_more_memory_than_one_that_waits_for_a_verdict(row):
    ours, floor = of_optax(*row, "lossscale"), of_optax(*row, "floor")
    assert ours.memory <= floor.memory + 0.1

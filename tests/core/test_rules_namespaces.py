"""The same steps under every array library, bit for bit.

A library that cannot be imported fails this module; none is left out.
"""

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from core import oracle
from lossscale.rules import DynamicScale


class Library(NamedTuple):
    """How the rule is run under one array library."""

    xp: Any
    asarray: Callable[[Any, str], Any]
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    counter: str = "int64"


LIBRARIES = {
    "numpy": Library(np, np.asarray),
    "tensorflow": Library(tf, tf.constant),
    "tf.function": Library(tf, tf.constant, tf.function),
    "tf.function-xla": Library(tf, tf.constant, functools.partial(tf.function, jit_compile=True)),
    "keras.ops": Library(keras.ops, keras.ops.convert_to_tensor),
    # JAX has 32-bit integers unless told otherwise for the whole process.
    "jax.numpy": Library(jnp, jnp.asarray, counter="int32"),
    "jax.jit": Library(jnp, jnp.asarray, jax.jit, counter="int32"),
    "torch": Library(torch, lambda value, dtype: torch.tensor(value, dtype=getattr(torch, dtype))),
}

RULES = {
    "powers of two": DynamicScale(initial_scale=8, growth_interval=2),
    "odd numbers": DynamicScale(
        initial_scale=3.3,
        growth_interval=2,
        growth_factor=1.7,
        backoff_factor=0.3,
        min_scale=0.1,
        max_scale=1000.1,
    ),
    # Here a product is subnormal, which XLA may flush to 0 and others do not.
    "lowest scales": DynamicScale(
        initial_scale=2.0**-125, growth_interval=3, backoff_factor=0.25, min_scale=2.0**-126
    ),
    "two overflows in a row": DynamicScale(growth_interval=3, overflows_before_backoff=2),
    # Here a product is infinite.
    "highest scales": DynamicScale(initial_scale=2.0**125, growth_interval=1, growth_factor=4),
}

# Two overflows in a row at the end, for the rule that waits for them.
FINITE_STEPS = random.Random(7).choices([True, False], weights=[3, 1], k=60) + [False] * 2


def states_of(rule, library, finite_steps):
    """Returns the states as (hexadecimal scale, count), and how often `update` ran in Python."""
    runs = []

    def update(state, finite):
        runs.append(1)
        return rule.update(state, finite, xp=library.xp)

    update = library.compiled(update) if library.compiled else update
    first = rule.init()
    counts = [library.asarray(count, library.counter) for count in first[1:]]
    state = type(first)(library.asarray(first.scale, "float32"), *counts)
    pairs = []
    # NumPy alone warns of an infinite product, which is meant and is not taken.
    with np.errstate(over="ignore", invalid="ignore"):
        for finite in finite_steps:
            state = update(state, library.asarray(finite, "bool"))
            assert isinstance(state, type(first))
            # That of PyTorch has its name in front.
            names = [str(getattr(one.dtype, "name", one.dtype)) for one in state]
            expected = ["float32"] + [library.counter] * len(counts)
            assert [name.removeprefix("torch.") for name in names] == expected
            pairs.append((float(state.scale).hex(), int(state.good_steps)))
    return pairs, len(runs)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_every_library_gives_the_bits_of_the_oracle_without_a_second_trace(library, rule):
    pairs, runs = states_of(rule, library, FINITE_STEPS)
    expected = oracle.trace(rule, FINITE_STEPS)
    assert pairs == [(scale.hex(), streak) for scale, streak in expected]
    assert runs == (1 if library.compiled else len(FINITE_STEPS))

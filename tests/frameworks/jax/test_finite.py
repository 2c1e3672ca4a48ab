"""The verdict on gradients under settings of XLA and JAX that are about numbers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify

from forks import Program
from lossscale import DynamicScale
from lossscale.optax import all_finite, loss_scaled

# Then jnp.isfinite is true of everything, and optax.apply_if_finite sees nothing.
NONE_EXPECTED = (
    "--xla_cpu_enable_fast_math=true "
    "--xla_cpu_fast_math_honor_infs=false --xla_cpu_fast_math_honor_nans=false"
)
PROGRAM = """
import itertools
import jax, jax.numpy as jnp, optax
from lossscale.jax import gradients
from lossscale.optax import all_finite, loss_scaled

tx = loss_scaled(optax.sgd(0.5), initial_scale=8)
update, look = jax.jit(tx.update), jax.jit(all_finite)
of_squares = jax.jit(lambda array: all_finite(array * array))
for_keras = jax.jit(lambda array, scale: gradients.all_finite([array], scale))
wrong = []
for size, dtype in itertools.product((5, 20_000), ("float32", "float16")):
    for value in (1.0, float("inf"), float("-inf"), float("nan")):
        array = jnp.ones(size, dtype).at[3].set(value)
        applied = int(update(array, tx.init(array))[1].steps_skipped) == 0
        kept = for_keras(array, jnp.float32(8))
        found = applied, bool(look(array)), bool(of_squares(array)), bool(kept)
        if found != (value == 1.0,) * 4:
            wrong.append((size, dtype, value, found))
print(wrong)
"""


def test_the_verdict_is_right_where_xla_is_told_that_all_numbers_are_finite():
    environment = {"XLA_FLAGS": NONE_EXPECTED, "JAX_PLATFORMS": "cpu"}
    program = Program(PROGRAM, environment=environment, module="lossscale.optax").finished()
    assert program.stdout.strip() == "[]", program.stderr[-3000:]


@pytest.mark.parametrize("scale", [8.0, 2.0**-3])
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_skipped_step_is_no_error_for_checkify(value, scale):
    rule = DynamicScale(initial_scale=scale, min_scale=2.0**-10)
    tx = loss_scaled(optax.adam(0.1), rule=rule)
    params = jnp.ones(2)
    checked = checkify.checkify(tx.update, errors=checkify.nan_checks)
    gradients = jnp.array([value, 1.0])
    # Adam divides by 1 - b1 ** count, which is 0 if its count stays 0 in this step.
    error, (_, state) = jax.jit(checked)(gradients, tx.init(params), params)
    assert error.get() is None
    assert int(state.steps_skipped) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_skipped_step_is_no_error_with_debug_nans_and_infs(value, dtype, compiled):
    tx = loss_scaled(optax.adamw(0.5), initial_scale=8)
    gradients = jnp.array([value, 1.0], dtype)
    state = tx.init(jnp.ones(2))
    with jax.debug_nans(True), jax.debug_infs(True):
        assert not bool(all_finite(gradients))
        update = jax.jit(tx.update) if compiled else tx.update
        for given in (gradients, jnp.ones(2, dtype)):
            _, state = update(given, state, jnp.ones(2))
    assert int(state.steps_skipped) == 1

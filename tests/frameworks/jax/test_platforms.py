"""A step is another program on a GPU than on a CPU: what shows without a compiler for GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from forks import Program
from lossscale import DynamicScale
from lossscale.jax import gradients as of_jax
from lossscale.jax import overflow_tracker
from lossscale.optax import loss_scaled

SMALL, LARGE, ALONE = 100, 20_000, of_jax.JOINED + 1


def placed(shape, spec, axis_type, devices=4):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",), axis_types=(axis_type,))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


@pytest.fixture
def on_gpu(monkeypatch):
    """What is traced is the program for a GPU."""

    def chosen(*, cuda, **_):
        return cuda()

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan, 0.0, -(2.0**14)])
@pytest.mark.parametrize("scale", [None, 8.0, 2.0**-126])
def test_the_check_of_a_gpu_is_that_of_a_cpu(on_gpu, dtype, value, scale):
    @jax.jit
    def check(given):
        return of_jax.all_finite(given, scale)

    for place in (0, 1, 3):
        given = [np.full(size, 2, jnp.dtype(dtype)) for size in (SMALL, LARGE, 0)]
        given.append(np.full((7, 1), -1, np.float16))
        given[place][-1] = value
        with np.errstate(over="ignore"):
            wide = [part.astype(np.float32) / np.float32(scale or 1) for part in given]
        expected = all(np.isfinite(part).all() for part in wide)
        assert expected == bool(check(list(map(jnp.asarray, given))))


def test_what_is_not_finite_is_counted_in_each_gradient():
    def with_some(size, dtype, *values):
        array = np.ones(size, dtype)
        array[: len(values)] = values
        return jnp.asarray(array)

    gradients = [
        with_some(LARGE, np.float32, np.inf, np.nan, -np.inf),
        None,
        with_some(SMALL, np.float16, np.nan),
        with_some(LARGE, np.float32, -np.nan),
        with_some(SMALL, np.complex64, complex(np.inf, np.nan), complex(1, -np.inf)),
        BCOO.fromdense(with_some(SMALL, np.float32, np.nan, -np.inf)),
        with_some(ALONE, np.float32, np.inf),
        jnp.zeros(0),
        jnp.full(ALONE, np.nan),
    ]
    expected = [[2, 1], [0, 0], [0, 1], [0, 1], [2, 1], [1, 1], [1, 0], [0, 0], [0, ALONE]]
    # Compiled as one program, which takes less time than an operation after the other.
    assert np.asarray(jax.jit(overflow_tracker._nonfinite)(gradients)).tolist() == expected
    assert np.asarray(overflow_tracker._nonfinite([None])).tolist() == [[0, 0]]


def groups(*given):
    """The sizes of what a GPU reads at once."""
    found = []

    def function(*arrays):
        found.extend(sum(given[place].size for place in each) for each in of_jax.in_groups(arrays))

    jax.jit(function).trace(*given)
    return sorted(found)


def test_a_gpu_reads_arrays_together_unless_they_are_large():
    one = jax.ShapeDtypeStruct((LARGE,), jnp.float32)
    half = jax.ShapeDtypeStruct((SMALL,), jnp.float16)
    large = jax.ShapeDtypeStruct((ALONE,), jnp.float32)
    assert groups(one, half, large, one, half) == [2 * SMALL, 2 * LARGE, ALONE]
    assert groups(*[one] * 70) == [6 * LARGE, 32 * LARGE, 32 * LARGE]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_several_devices_may_share_are_not_joined_which_would_gather_them(axis_type):
    shared = placed((LARGE,), PartitionSpec("d"), axis_type)
    assert groups(shared, shared) == [LARGE, LARGE]
    few = placed((SMALL,), PartitionSpec("d"), axis_type)
    other = placed((SMALL // 5, 5), PartitionSpec("d"), axis_type)
    assert groups(few, other, few) == [SMALL, 2 * SMALL]
    on_one = placed((LARGE,), PartitionSpec(), AxisType.Auto, devices=1)
    assert groups(on_one, on_one) == [2 * LARGE]


def branches(program):
    """The operands that a lowered program branches on, except those that are known."""
    known = re.findall(r'(%\w+)(?::\d+)? = "?stablehlo\.(?:constant|clamp|case)\b', program)
    return set(re.findall(r'"?stablehlo\.(?:case|if)"?\((%\w+)', program)) - set(known)


@pytest.mark.parametrize("tracked", [False, True])
def test_only_a_program_for_a_cpu_has_a_branch(tracked):
    tx = loss_scaled(optax.adam(1e-3), track_overflows=tracked)
    params = [jax.ShapeDtypeStruct((LARGE,), jnp.float32)] * 3

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    traced = step.trace(params, jax.eval_shape(tx.init, params), params)
    for platform in ("cuda", "rocm"):
        # The host of a GPU would wait in each step, to read the number.
        assert not branches(traced.lower(lowering_platforms=(platform,)).as_text())
    # There, counting in each step would read the gradients once more.
    assert len(branches(traced.lower(lowering_platforms=("cpu",)).as_text())) == tracked


def test_a_branch_for_another_platform_is_never_compiled():
    def refused(x):
        half = x.astype(jnp.float16)
        return x + jax.lax.dot(half, half, precision="F16_F16_F32").astype(x.dtype)

    params = jnp.float32([1.0, -2.0])
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"not supported|Unsupported"
    ):
        jax.jit(refused)(params)

    def update(updates, state, params=None):
        of_tpu = {"default": lambda x: x + 1.0, "tpu": refused}
        return updates, jax.lax.platform_dependent(state, **of_tpu)

    tx = loss_scaled(optax.GradientTransformation(lambda params: params, update))
    for factor, expected in ((1.0, [2.0, -1.0]), (jnp.inf, [1.0, -2.0])):
        _, state = jax.jit(tx.update)(params * factor, tx.init(params))
        assert state.inner_state.tolist() == expected


# --- Settings of XLA and JAX that are about numbers -----------------------------------------------

# Then jnp.isfinite is true of everything, and optax.apply_if_finite sees nothing.
NONE_EXPECTED = (
    "--xla_cpu_enable_fast_math=true "
    "--xla_cpu_fast_math_honor_infs=false --xla_cpu_fast_math_honor_nans=false"
)
PROGRAM = """
import itertools
import jax, jax.numpy as jnp, optax
from lossscale.jax import gradients
from lossscale.optax import loss_scaled

tx = loss_scaled(optax.sgd(0.5), initial_scale=8)
update, look = jax.jit(tx.update), jax.jit(lambda array: gradients.all_finite([array]))
of_squares = jax.jit(lambda array: gradients.all_finite([array * array]))
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
        assert not bool(of_jax.all_finite([gradients]))
        update = jax.jit(tx.update) if compiled else tx.update
        for given in (gradients, jnp.ones(2, dtype)):
            _, state = update(given, state, jnp.ones(2))
    assert int(state.steps_skipped) == 1

"""The same scales on one device and on many, and no device that goes its own way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale.errors import GradientsError
from lossscale.optax import loss_scaled, value_and_grad

AUTO = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
TWO_AXES = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

SHAPES = {"w": (4, 2048), "b": (8,)}
SCALES = [8.0, 4.0, 4.0, 8.0]


def first_params():
    return {name: jnp.ones(shape) / 8 for name, shape in SHAPES.items()}


def batches():
    """Inputs of four steps; in the second one, one element of one device's part overflows."""
    made = [np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4) + i / 8 for i in range(4)]
    made[1] = made[1].copy()
    made[1][5, 2] = np.inf
    return made


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def optimizer(axis_name=None, inner=None):
    wrapped = optax.adamw(1e-2) if inner is None else inner
    return loss_scaled(wrapped, initial_scale=8, dynamic_growth_steps=2, axis_name=axis_name)


def step(tx, params, opt_state, batch, reduced_over=None):
    loss, gradients = value_and_grad(loss_fn)(opt_state, params, batch)
    if reduced_over is not None:
        gradients = jax.lax.pmean(gradients, reduced_over)
    updates, opt_state = tx.update(gradients, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def run(compiled, params, opt_state, place=lambda batch: batch):
    """Runs the four steps; returns the parameters and all scales on all devices."""
    scales = []
    for batch in batches():
        params, opt_state = compiled(params, opt_state, place(batch))
        scales.append(on_every_device(opt_state.loss_scale))
    return jax.tree.map(np.asarray, params), scales, opt_state


def on_every_device(array):
    """The value of a scalar, which must be the same on all devices."""
    held = {float(value) for shard in array.addressable_shards for value in np.ravel(shard.data)}
    (value,) = held
    return value


@pytest.fixture(scope="module")
def on_one_device():
    tx = optimizer()
    params, scales, _ = run(
        jax.jit(lambda *a: step(tx, *a)), first_params(), tx.init(first_params())
    )
    assert scales == SCALES
    return params


def check(found, expected):
    params, scales, opt_state = found
    assert scales == SCALES
    assert on_every_device(opt_state.steps_skipped) == 1
    for name, value in expected.items():
        np.testing.assert_allclose(np.ravel(params[name]), np.ravel(value), rtol=1e-4)


LAYOUTS = {
    "replicated": ({"w": P(), "b": P()}, P("data")),
    "sharded": ({"w": P(None, "data"), "b": P("data")}, P()),
}


def params_on(mesh, specs):
    return jax.tree.map(
        lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), first_params(), specs
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_jit_with_sharded_arrays(mesh, layout, on_one_device):
    specs, batch_spec = LAYOUTS[layout]
    tx = optimizer()
    with jax.set_mesh(mesh):
        params = params_on(mesh, specs)
        opt_state = tx.init(params)
        assert opt_state.inner_state[0].mu["w"].sharding == params["w"].sharding
        compiled = jax.jit(lambda *a: step(tx, *a), donate_argnums=(0, 1))
        place = NamedSharding(mesh, batch_spec)
        found = run(compiled, params, opt_state, lambda batch: jax.device_put(batch, place))
        if layout == "sharded":
            # An eager step on arrays that several devices hold.
            bad = jax.tree.map(lambda p: p * jnp.nan, params_on(mesh, specs))
            updates, after = tx.update(bad, tx.init(bad), params_on(mesh, specs))
            assert float(after.loss_scale) == 4.0
            assert updates["w"].sharding.is_equivalent_to(NamedSharding(mesh, specs["w"]), 2)
    check(found, on_one_device)


def shard_mapped(tx, layout, reduced_over, check_vma):
    specs, batch_spec = LAYOUTS[layout]
    opt_state = tx.init(first_params())
    state_specs = optax.tree_map_params(
        tx, lambda leaf, spec: spec, opt_state, specs, transform_non_params=lambda leaf: P()
    )
    compiled = jax.jit(
        jax.shard_map(
            lambda *a: step(tx, *a, reduced_over),
            mesh=AUTO,
            in_specs=(specs, state_specs, batch_spec),
            out_specs=(specs, state_specs),
            check_vma=check_vma,
        )
    )
    return run(compiled, first_params(), opt_state)


INNERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 1),
}


@pytest.mark.parametrize(
    ("layout", "axis_name", "check_vma", "name"),
    [
        ("replicated", None, True, "adamw"),
        ("replicated", None, False, "adamw"),
        ("replicated", "data", True, "adamw"),
        ("replicated", "data", False, "adamw"),
        ("sharded", "data", True, "adamw"),
        ("sharded", "data", True, "MultiSteps"),
        ("sharded", "data", False, "MultiSteps"),
    ],
)
def test_shard_map(layout, axis_name, check_vma, name, on_one_device):
    # With the check on, JAX has summed the gradients of what is replicated already.
    reduced_over = "data" if layout == "replicated" and not check_vma else None
    tx = optimizer(axis_name, INNERS[name]())
    found = shard_mapped(tx, layout, reduced_over, check_vma)
    check(found, on_one_device if reduced_over else {})


def test_devices_that_would_part_are_an_error():
    with pytest.raises(GradientsError, match=r"mesh axis 'data'.*pmean.*axis_name='data'"):
        shard_mapped(optimizer(), "sharded", None, check_vma=True)


@pytest.mark.parametrize("names", ["data", ("data", "model")])
def test_an_overflow_anywhere_on_the_axes_skips_everywhere(names):
    tx = optimizer(names, optax.sgd(0.1))
    gradients = jnp.ones((4, 4)).at[3, 1].set(jnp.nan)
    spec = P(("data", "model"))

    def update(gradients, opt_state):
        updates, opt_state = tx.update(gradients, opt_state)
        return updates, opt_state.loss_scale[None]

    call = jax.shard_map(
        update, mesh=TWO_AXES, in_specs=(spec, P()), out_specs=(spec, spec), check_vma=False
    )
    _, scales = jax.jit(call)(gradients, tx.init(gradients))
    # Along one axis only, the two devices that share the last place of the other one skip.
    assert scales.tolist() == ([4.0] * 4 if names != "data" else [8.0, 4.0, 8.0, 4.0])


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_pmap(axis_name, on_one_device):
    tx = optimizer(axis_name)
    compiled = jax.pmap(lambda *a: step(tx, *a, "data"), axis_name="data")
    copies = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (4, *a.shape)), (first_params(), tx.init(first_params()))
    )
    params, scales, opt_state = run(compiled, *copies, lambda batch: batch.reshape(4, 2, 4))
    check((jax.tree.map(lambda p: p[0], params), scales, opt_state), on_one_device)

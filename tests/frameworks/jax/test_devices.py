"""The same scales on one device and on many, and no device that goes its own way."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from frameworks.jax.support import bits
from lossscale.errors import GradientsError
from lossscale.optax import Monitor, loss_scaled, value_and_grad
from pages import DOCS

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


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_pmap(axis_name, on_one_device):
    tx = optimizer(axis_name)
    compiled = jax.pmap(lambda *a: step(tx, *a, "data"), axis_name="data")
    copies = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (4, *a.shape)), (first_params(), tx.init(first_params()))
    )
    params, scales, opt_state = run(compiled, *copies, lambda batch: batch.reshape(4, 2, 4))
    check((jax.tree.map(lambda p: p[0], params), scales, opt_state), on_one_device)


# --- Tracked overflows ----------------------------------------------------------------------------

# Of what is divided, the last device has nothing that overflows.
OVERFLOWED = {
    "kernel": jnp.ones((4, 4))
    .at[[0, 1, 1], [1, 0, 3]]
    .set(jnp.array([jnp.inf, -jnp.inf, jnp.nan])),
    "bias": jnp.ones(8).at[jnp.array([0, 3])].set(jnp.inf),
}
ONE_AXIS = [{"kernel": P("data"), "bias": P()}, {"kernel": P(), "bias": P()}]
BOTH_AXES = [
    {"kernel": P("data", "model"), "bias": P(("data", "model"))},
    {"kernel": P("data"), "bias": P("model")},
]
TRACKED = [
    *((AUTO, "data", way, ONE_AXIS[0]) for way in ("checked", "unchecked", "pmap")),
    *((AUTO, "data", way, ONE_AXIS[1]) for way in ("checked", "unchecked")),
    *((AUTO, None, way, specs) for way in ("checked", "jit") for specs in ONE_AXIS[1:]),
    (EXPLICIT, None, "jit", ONE_AXIS[0]),
    *((TWO_AXES, "data", way, ONE_AXIS[0]) for way in ("checked", "unchecked")),
    *(
        (TWO_AXES, ("data", "model"), way, specs)
        for way in ("checked", "unchecked", "copies")
        for specs in BOTH_AXES
    ),
    (TWO_AXES, None, "jit", BOTH_AXES[0]),
    (jax.make_mesh((1,), ("data",)), None, "jit", ONE_AXIS[0]),
]


def state_after(tx, way, mesh, specs):
    """The state after a step in which gradients overflow, with the gradients on several devices."""
    state, axes = tx.init(OVERFLOWED), mesh.axis_names
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)

    def update(gradients, state):
        return tx.update(gradients, state)[1]

    def of_copies(gradients, states):
        state = update(gradients, jax.tree.map(lambda leaf: leaf[0], states))
        return jax.tree.map(lambda leaf: leaf[None], state)

    def mapped(function, spec, state):
        shards = {"in_specs": (specs, spec), "out_specs": spec, "check_vma": way != "unchecked"}
        return jax.jit(jax.shard_map(function, mesh=mesh, **shards))(OVERFLOWED, state)

    if way == "jit":
        with jax.set_mesh(mesh):
            place = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
            return jax.jit(update)(jax.device_put(OVERFLOWED, place), tx.init(OVERFLOWED))
    if way in ("checked", "unchecked"):
        return mapped(update, P(), state)
    if way == "copies":
        # As of a program that was written for `pmap`: each device has a state of its own.
        found = mapped(of_copies, P(axes), copies)
    else:
        parts = {**OVERFLOWED, "kernel": OVERFLOWED["kernel"][:, None]}
        in_axes = {"kernel": 0, "bias": None}, 0
        found = jax.pmap(update, "data", in_axes=in_axes)(parts, copies)
    return jax.tree.map(lambda leaf: leaf[-1], found)


@pytest.mark.parametrize(("mesh", "axis_name", "way", "specs"), TRACKED)
def test_a_monitor_gets_the_counts_of_all_devices(mesh, axis_name, way, specs):
    tx = loss_scaled(optax.sgd(0.1), axis_name=axis_name, track_overflows=True)
    with Monitor(tx, OVERFLOWED, tx.init(OVERFLOWED)) as monitor:
        monitor.step(state_after(tx, way, mesh, specs))
    expected = {}
    for name, leaf in OVERFLOWED.items():
        copies = 1
        if way in ("unchecked", "pmap"):
            # There JAX does not say that devices along an axis have the same gradient.
            axes = np.ravel([axis_name, mesh.axis_names][isinstance(axis_name, tuple)])
            copies = np.prod([mesh.shape[axis] for axis in axes if axis not in str(specs[name])])
        expected[name] = copies * np.isinf(leaf).sum(), copies * np.isnan(leaf).sum()
    assert {each.name: each[1:] for each in monitor.last_record.nonfinite} == expected
    assert (monitor.last_record.scale, monitor.last_record.steps_skipped) == (2.0**15, 1)


# --- Checkpoints ----------------------------------------------------------------------------------

PAGE = (DOCS / "jax_devices.md").read_text()
TARGET, LAST = re.search(r"```py\n(.*\n)(.*)\n```", PAGE, re.S).groups()
# Without `out_shardings`, JAX divides `up` and `b` in the first step.
SPECS = {"up": P(), "b": P(), "down": P("data"), "gain": P()}


def autoencoder(params, batch):
    hidden = jnp.tanh(batch @ params["up"] + params["b"])
    return jnp.mean((hidden @ params["down"] * params["gain"] - batch) ** 2)


def on_mesh(mesh):
    """Parameters on a mesh."""
    up = jax.random.normal(jax.random.key(0), (32, 64)) / 4
    params = {"up": up, "b": jnp.zeros(64), "down": up.T[:, ::-1], "gain": jnp.ones(32)}
    return jax.device_put(params, {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()})


def continued(tx, run, mesh, numbers, bad=None, shardings=None):
    """The parameters and the state after a step for each number, one of which may overflow."""
    is_scaled = hasattr(run[1], "loss_scale")

    @functools.partial(jax.jit, out_shardings=shardings)
    def step(run, batch):
        params, opt_state = run
        derive = value_and_grad(autoencoder) if is_scaled else jax.value_and_grad(autoencoder)
        _, gradients = derive(*[opt_state] * is_scaled, params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in numbers:
        batch = jax.random.normal(jax.random.key(number), (16, 32))
        batch *= np.inf if number == bad else 1.0
        run = step(run, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    return run


def page_lines(tx, mesh, params, **more):
    """The names that the lines of the page set."""
    found = {**globals(), "PartitionSpec": P, "tx": tx, "mesh": mesh, "params": params, **more}
    exec(TARGET + LAST if more else TARGET, found)
    return found


def restored(tx, run, mesh, folder):
    params = on_mesh(mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        for name, part in zip(("params", "state"), run, strict=True):
            checkpointer.save(folder / name, part)
            checkpointer.wait_until_finished()
        found = page_lines(tx, mesh, params, checkpointer=checkpointer, path=folder / "state")
        return checkpointer.restore(folder / "params", params), found["opt_state"]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("tx", "given"), [(optimizer(), True), (optax.adamw(1e-2), False)])
def test_a_run_continues_bit_for_bit_with_its_shardings_and_plain_optax_not_without(
    tx, given, tmp_path
):
    params, shardings = on_mesh(TWO_AXES), None
    if given:
        target = params, page_lines(tx, TWO_AXES, params)["target"]
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    run = params, tx.init(params)
    midway = continued(tx, run, TWO_AXES, range(4), shardings=shardings)
    resumed = restored(tx, midway, TWO_AXES, tmp_path)
    assert bits(resumed) == bits(midway)
    ends = (continued(tx, e, TWO_AXES, range(4, 8), shardings=shardings) for e in (midway, resumed))
    assert (bits(next(ends)) == bits(next(ends))) is given


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_continues_on_another_number_of_devices(devices, tmp_path):
    tx, params = optimizer(), on_mesh(TWO_AXES)
    mesh = Mesh(np.reshape(jax.devices()[:devices], (devices, 1)), ("data", "model"))
    midway = continued(tx, (params, tx.init(params)), TWO_AXES, range(4), bad=1)
    resumed = restored(tx, midway, mesh, tmp_path)
    assert bits(resumed) == bits(midway)
    found, expected = (
        continued(tx, run, on, range(4, 9), bad=7)
        for run, on in ((resumed, mesh), (midway, TWO_AXES))
    )
    assert (float(found[1].loss_scale), int(found[1].steps_skipped)) == (8.0, 2)
    for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-6)

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


# --- Tracked overflows ----------------------------------------------------------------------------

OVERFLOWED = {
    "kernel": jnp.ones((4, 4))
    .at[[0, 1, 3], [1, 0, 3]]
    .set(jnp.array([jnp.inf, -jnp.inf, jnp.nan])),
    "bias": jnp.ones(8).at[jnp.array([0, 3, 7])].set(jnp.inf),
    "gain": jnp.array([1.0, jnp.nan]),
}
ONE_AXIS = [
    {"kernel": P("data"), "bias": P("data"), "gain": P()},
    {"kernel": P(), "bias": P(), "gain": P()},
]
BOTH_AXES = [
    {"kernel": P("data", "model"), "bias": P(("data", "model")), "gain": P("model")},
    {"kernel": P("data"), "bias": P("model"), "gain": P()},
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

    def update(gradients, state):
        return tx.update(gradients, state)[1]

    def of_copies(gradients, states):
        state = update(gradients, jax.tree.map(lambda leaf: leaf[0], states))
        return jax.tree.map(lambda leaf: leaf[None], state)

    if way == "jit":
        with jax.set_mesh(mesh):
            place = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
            return jax.jit(update)(jax.device_put(OVERFLOWED, place), tx.init(OVERFLOWED))
    if way == "pmap":
        given = {
            name: leaf.reshape(4, -1, *leaf.shape[1:]) if specs[name] else leaf
            for name, leaf in OVERFLOWED.items()
        }
        in_axes = {name: 0 if spec else None for name, spec in specs.items()}
        found = jax.pmap(update, "data", in_axes=(in_axes, None))(given, state)
    elif way == "copies":
        # As of a program that was written for `pmap`: each device has a state of its own.
        shards = {"in_specs": (specs, P(axes)), "out_specs": P(axes)}
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
        found = jax.jit(jax.shard_map(of_copies, mesh=mesh, **shards))(OVERFLOWED, copies)
    else:
        shards = {"in_specs": (specs, P()), "out_specs": P(), "check_vma": way == "checked"}
        return jax.jit(jax.shard_map(update, mesh=mesh, **shards))(OVERFLOWED, state)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
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

RESTORE = re.search(r"```py\n(.*?)```", (DOCS / "jax_devices.md").read_text(), re.S)[1]
# Without `out_shardings`, JAX divides `up` and `b` in the first step.
SPECS = {"up": P(), "b": P(), "down": P("data"), "gain": P()}


def autoencoder(params, batch):
    hidden = jnp.tanh(batch @ params["up"] + params["b"])
    return jnp.mean((hidden @ params["down"] * params["gain"] - batch) ** 2)


def start(tx, mesh):
    """The parameters and the state of a run, and their shardings."""
    keys = jax.random.split(jax.random.key(0))
    shapes = {"up": (32, 64), "down": (64, 32)}
    params = {n: jax.random.normal(key, shapes[n]) / 4 for n, key in zip(shapes, keys, strict=True)}
    params |= {"b": jnp.zeros(64), "gain": jnp.ones(32)}
    placed = {n: jax.device_put(leaf, NamedSharding(mesh, SPECS[n])) for n, leaf in params.items()}
    run, replicated = (placed, tx.init(placed)), NamedSharding(mesh, P())
    kept = jax.tree.map(
        lambda leaf: leaf.sharding if isinstance(leaf.sharding, NamedSharding) else replicated, run
    )
    return jax.device_put(run, kept), kept


def continued(tx, run, mesh, numbers, shardings=None):
    """A run after more steps, the second of which overflows with loss scaling; and the scales."""

    @functools.partial(jax.jit, out_shardings=shardings)
    def step(run, batch):
        params, opt_state = run
        if is_scaled:
            _, gradients = value_and_grad(autoencoder)(opt_state, params, batch)
        else:
            gradients = jax.grad(autoencoder)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    is_scaled, scales = hasattr(run[1], "loss_scale"), []
    for number in numbers:
        batch = jax.random.normal(jax.random.key(number), (16, 32))
        batch *= np.inf if is_scaled and number % 3 == 1 else 1.0
        run = step(run, jax.device_put(batch, NamedSharding(mesh, P("data"))))
        scales += [float(run[1].loss_scale)] if is_scaled else []
    return run, scales


def restored(tx, run, mesh, folder):
    """What the page's lines restore onto a mesh."""
    (params, _), _ = start(tx, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        for number, part in enumerate(run):
            checkpointer.save(folder / str(number), part)
            checkpointer.wait_until_finished()
        found = {**globals(), "PartitionSpec": P, "tx": tx, "params": params, "mesh": mesh}
        found |= {"checkpointer": checkpointer, "path": folder / "1"}
        exec(RESTORE, found)
        return checkpointer.restore(folder / "0", params), found["opt_state"]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("tx", "given"), [(optimizer(), True), (optax.adamw(1e-2), True), (optax.adamw(1e-2), False)]
)
def test_a_run_continues_bit_for_bit_if_its_shardings_are_given_as_with_plain_optax(
    tx, given, tmp_path
):
    run, shardings = start(tx, TWO_AXES)
    shardings = shardings if given else None
    midway, _ = continued(tx, run, TWO_AXES, range(4), shardings)
    resumed = restored(tx, midway, TWO_AXES, tmp_path)
    assert bits(resumed) == bits(midway)
    ends = [continued(tx, each, TWO_AXES, range(4, 8), shardings)[0] for each in (midway, resumed)]
    assert (bits(ends[0]) == bits(ends[1])) is given


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_continues_on_another_number_of_devices(devices, tmp_path):
    tx, mesh = (
        optimizer(),
        Mesh(np.reshape(jax.devices()[:devices], (devices, 1)), ("data", "model")),
    )
    midway, _ = continued(tx, *start(tx, TWO_AXES)[:1], TWO_AXES, range(4))
    resumed = restored(tx, midway, mesh, tmp_path)
    assert bits(resumed) == bits(midway)
    found, expected = (
        continued(tx, *each, range(4, 9)) for each in ((resumed, mesh), (midway, TWO_AXES))
    )
    assert found[1] == expected[1]
    assert int(found[0][1].steps_skipped) == int(expected[0][1].steps_skipped) == 3
    jax.tree.map(
        lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-6), found[0], expected[0]
    )

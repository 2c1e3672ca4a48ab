"""The monitor of loops with Optax, and what a step notes for it."""

import functools
import importlib.util
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import lossscale
import lossscale.optax
from frameworks.jax.support import bits
from histories import TrainingHistory
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    ArgumentTypeError,
    LossScaleWarning,
    TrainingHaltedError,
    UnsupportedError,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

RULE = lossscale.DynamicScale(initial_scale=8, growth_interval=4)
PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
BARE = lossscale.optax.loss_scaled(optax.adam(0.1), rule=RULE)
NOTED = lossscale.optax.noted(BARE)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def step(tx, params, opt_state, spoiled):
    """A step whose gradients are all 2.0 but for one of the kernel."""
    grads = jax.tree.map(
        lambda p: jnp.full_like(p, 2.0) * lossscale.optax.loss_scale(opt_state), params
    )
    grads["dense"]["kernel"] = grads["dense"]["kernel"].at[0, 0].multiply(spoiled)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.float32(0.5)


def start(tx):
    params = jax.tree.map(jnp.copy, PARAMS)
    return params, tx.init(params)


def watched(tx, verdicts, loss=None, **arguments):
    """The records of a run, without alarms."""
    params, opt_state = start(tx)
    with (
        warnings.catch_warnings(),
        lossscale.optax.Monitor(tx, PARAMS, opt_state, **arguments) as monitor,
    ):
        warnings.simplefilter("ignore", LossScaleWarning)
        for finite in verdicts:
            params, opt_state, _ = step(tx, params, opt_state, 1.0 if finite else jnp.inf)
            monitor.step(opt_state, loss)
    return monitor


def history(tx, verdicts, path, **arguments):
    watched(tx, verdicts, path=path, **arguments)
    return TrainingHistory.read(path).records


# What is recorded.


@pytest.mark.parametrize("tx", [BARE, NOTED], ids=["bare", "noted"])
def test_every_step_is_recorded_with_its_scale(tx, tmp_path):
    records = history(tx, [True, False, False, True], tmp_path / "run.jsonl", loss=0.5)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert [record.scale for record in records] == [8, 8, 4, 2]
    assert [record.next_scale for record in records] == [8, 4, 2, 2]
    assert [record.skipped for record in records] == [False, True, True, False]
    assert [record.steps_skipped for record in records] == [0, 1, 2, 2]
    assert [record.reason for record in records] == [None, "overflow", "overflow", None]
    assert {record.loss for record in records} == {0.5}
    named = [str(tensor) for record in records for tensor in record.nonfinite]
    assert named == (["dense/kernel (1 inf)"] * 2 if tx is NOTED else [])


@pytest.mark.parametrize("tx", [BARE, NOTED], ids=["bare", "noted"])
def test_sampled_steps_count_what_is_between_them(tx, tmp_path):
    verdicts = [True, False, True, True, False, True, True]
    records = history(tx, verdicts, tmp_path / "run.jsonl", every=4)
    # The first, the fourth, and the last; and with notes the skip between.
    expected = [(1, 8, 0), (2, 8, 1), (4, 4, 1), (5, 4, 2), (7, 2, 2)]
    if tx is BARE:
        expected = [row for row in expected if row[0] in (1, 4, 7)]
    assert [(r.step, r.scale, r.steps_skipped) for r in records] == expected


def test_a_loss_that_is_not_finite_is_the_reason(tmp_path):
    (record,) = history(BARE, [False], tmp_path / "run.jsonl", loss=np.float32(np.nan))
    assert record.reason == "loss"


def test_nothing_is_read_of_steps_that_are_not_sampled():
    params, opt_state = start(NOTED)
    monitor = lossscale.optax.Monitor(NOTED, PARAMS, opt_state, every=1000)
    for number in range(3):
        params, opt_state, loss = step(NOTED, params, opt_state, 1.0)
        with jax.transfer_guard_device_to_host("disallow" if number else "allow"):
            monitor.step(opt_state, loss)
    assert monitor.last_record.step == 1
    monitor.close()
    assert monitor.last_record.step == 3


def test_a_last_step_whose_buffers_are_gone_is_left_out():
    params, opt_state = start(BARE)
    monitor = lossscale.optax.Monitor(BARE, PARAMS, opt_state, every=1000)
    for _ in range(2):
        params, opt_state, _ = step(BARE, params, opt_state, 1.0)
        monitor.step(opt_state)
    step(BARE, params, opt_state, 1.0)
    monitor.close()
    assert monitor.last_record.step == 1


def test_several_steps_in_one_call():
    @jax.jit
    def steps(params, opt_state, spoiled):
        def one(carry, factor):
            grads = jax.tree.map(lambda p: jnp.full_like(p, 8.0) * factor, carry[0])
            updates, opt_state = NOTED.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), opt_state), None

        return jax.lax.scan(one, (params, opt_state), spoiled)[0]

    params, opt_state = start(NOTED)
    with lossscale.optax.Monitor(NOTED, PARAMS, opt_state) as monitor:
        params, opt_state = steps(params, opt_state, jnp.float32([1, jnp.inf, 1]))
        monitor.step(opt_state, steps=3)
    assert (monitor.last_record.step, monitor.last_record.scale) == (3, 4)
    assert monitor.last_record.steps_skipped == 1
    params, opt_state = start(BARE)
    monitor = lossscale.optax.Monitor(BARE, PARAMS, opt_state)
    with pytest.raises(ArgumentError, match=r"lossscale\.optax\.noted\(tx\)"):
        monitor.step(opt_state, steps=3)


def test_the_alarms_end_a_run_and_its_history_is_there(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(TrainingHaltedError, match="dense/kernel"):
        watched(NOTED, [False] * 5, path=path, max_consecutive_skips=3)
    assert len(TrainingHistory.read(path).records) == 3
    params, opt_state = start(BARE)
    monitor = lossscale.optax.Monitor(BARE, PARAMS, opt_state)
    for _ in range(3):
        params, opt_state, _ = step(BARE, params, opt_state, jnp.inf)
        monitor.step(opt_state)
    params, opt_state, _ = step(BARE, params, opt_state, jnp.inf)
    with pytest.warns(LossScaleWarning, match="lowest loss scale"):
        monitor.step(opt_state)


def test_a_resumed_run_goes_on_in_its_history(tmp_path):
    path = tmp_path / "run.jsonl"
    for tx, arguments in ((NOTED, {}), (BARE, {"steps_before": 2})):
        path.unlink(missing_ok=True)
        params, opt_state = start(tx)
        for part in range(2):
            resumed = {"append": True, **arguments} if part else {}
            with lossscale.optax.Monitor(tx, PARAMS, opt_state, path, **resumed) as monitor:
                for _ in range(2):
                    params, opt_state, loss = step(tx, params, opt_state, 1.0)
                    monitor.step(opt_state, loss)
        assert [r.step for r in TrainingHistory.read(path).records] == [1, 2, 3, 4]


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="needs tensorboardX")
def test_tensorboard(tmp_path):
    watched(NOTED, [True, True], tensorboard=tmp_path / "logs")
    assert list((tmp_path / "logs").iterdir())


def test_an_nnx_optimizer_is_watched():
    @nnx.jit
    def train_step(model, optimizer, x):
        value_and_grad = lossscale.optax.value_and_grad(
            lambda m: jnp.mean(m(x).astype(jnp.float32) ** 2), grad=nnx.value_and_grad
        )
        loss, grads = value_and_grad(optimizer, model)
        optimizer.update(model, grads)
        return loss

    model = nnx.Linear(4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, NOTED, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    with lossscale.optax.Monitor(NOTED, params, optimizer) as monitor:
        loss = train_step(model, optimizer, jnp.full((2, 4), 2.0**13))
        monitor.step(optimizer, loss)
    record = monitor.last_record
    assert record.reason == "overflow"
    assert [tensor.name for tensor in record.nonfinite] == ["bias", "kernel"]


# What no skipped step shows.


def small_loss(params, batch, dtype):
    """A loss whose gradients are partly lost in float16."""
    outputs = batch.astype(dtype) @ params["w"].astype(dtype)
    return jnp.mean(outputs.astype(jnp.float32) ** 2) * 2.0**-26


FIXED = lossscale.optax.loss_scaled(optax.sgd(0.5), rule=lossscale.FixedScale(4.0))
BATCH = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
WEIGHTS = {"w": jnp.float32([[1.0], [2.0**-6], [2.0**-10]])}


@functools.partial(jax.jit, donate_argnums=(0, 1))
def small_step(params, opt_state):
    value_and_grad = lossscale.optax.value_and_grad(small_loss)
    loss, grads = value_and_grad(opt_state, params, BATCH, jnp.float16)
    updates, opt_state = FIXED.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def test_gradients_are_measured_at_the_scale_in_use(tmp_path):
    params = jax.tree.map(jnp.copy, WEIGHTS)
    opt_state, path = FIXED.init(params), tmp_path / "run.jsonl"
    traced = []

    def loss_fn(params, batch, dtype):
        traced.append(dtype)
        return small_loss(params, batch, dtype)

    settings = {"every": 100, "measure_every": 4, "loss_fn": loss_fn, "data": BATCH}
    with lossscale.optax.Monitor(FIXED, params, opt_state, path, **settings) as monitor:
        params, opt_state, loss = small_step(params, opt_state)
        with pytest.warns(LossScaleWarning, match="gets the gradient of w wrong by"):
            monitor.step(opt_state, loss, params=params)
        count = len(traced)
        for _ in range(4):
            # What was measured may be donated.
            params, opt_state, loss = small_step(params, opt_state)
            monitor.step(opt_state, loss, params=params)
        wanted = wrong_by_hand(params)
        assert monitor.wrong_at(params) == ("w", pytest.approx(wanted, rel=1e-3))
        with pytest.raises(ArgumentError, match=r"monitor\.wrong_at\(params\)"):
            monitor.wrong_at()
    # Passes are compiled once, for parameters that change.
    assert len(traced) == count
    records = TrainingHistory.read(path).records
    assert [(r.step, r.wrong is not None) for r in records] == [(1, True), (4, True), (5, False)]
    assert wanted > 0.1


def wrong_by_hand(params):
    """What float16 loses of the gradient at a scale of 4, and not at one of 2**24."""

    def gradient(dtype, scale):
        return jax.grad(lambda p: small_loss(p, BATCH, dtype) * scale)(params)["w"] / scale

    wide = gradient(jnp.float32, 1.0)
    low, high = (jnp.linalg.norm(gradient(jnp.float16, s) - wide) for s in (4.0, 2.0**24))
    return float(jnp.sqrt(low**2 - high**2) / jnp.linalg.norm(wide))


def test_a_train_state_has_its_parameters_and_a_model_is_given():
    from flax.training.train_state import TrainState

    settings = {"measure_every": 1, "data": BATCH * 2**12}
    state = TrainState.create(apply_fn=None, params=WEIGHTS, tx=FIXED)
    with lossscale.optax.Monitor(FIXED, WEIGHTS, state, loss_fn=small_loss, **settings) as monitor:
        grads = jax.tree.map(jnp.zeros_like, WEIGHTS)
        monitor.step(state.apply_gradients(grads=grads))
    assert monitor.last_record.wrong[0] == "w"

    def loss_fn(model, batch, dtype):
        model.set_attributes(dtype=dtype, raise_if_not_found=False)
        return jnp.mean(model(batch).astype(jnp.float32) ** 2) * 2.0**-40, "anything"

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, FIXED, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    settings = {**settings, "loss_fn": loss_fn, "grad": nnx.value_and_grad, "has_aux": True}
    with lossscale.optax.Monitor(FIXED, params, optimizer, **settings) as monitor:
        optimizer.update(model, jax.tree.map(jnp.zeros_like, params))
        with pytest.raises(ArgumentError, match="params=params"):
            monitor.step(optimizer)
        with pytest.warns(LossScaleWarning, match="wrong by"):
            monitor.step(optimizer, params=model)
        assert monitor.wrong_at(model) == monitor.last_record.wrong
    assert monitor.last_record.wrong[0] in ("bias", "kernel")
    assert model.dtype is None


def only_wide(params, batch, dtype):
    if dtype == jnp.float16:
        raise NotImplementedError("no kernel")
    return small_loss(params, batch, dtype)


@pytest.mark.parametrize(
    ("loss_fn", "data", "words"),
    [
        (only_wide, BATCH, "NotImplementedError: no kernel"),
        (lambda p, b: 0.0, BATCH, r"loss_fn\(params, batch, dtype\)"),
        (lambda p, b, d: jnp.sum(b @ p["w"]), BATCH, "computes nothing in float16"),
        (small_loss, BATCH[:, :2], "TypeError: dot_general"),
        (small_loss, BATCH * np.nan, "the loss is not finite in float32 already"),
    ],
)
def test_what_cannot_be_measured_is_said_once_and_training_goes_on(loss_fn, data, words):
    opt_state = FIXED.init(WEIGHTS)
    settings = {"measure_every": 1, "loss_fn": loss_fn, "data": data}
    with lossscale.optax.Monitor(FIXED, WEIGHTS, opt_state, **settings) as monitor:
        with pytest.warns(
            LossScaleWarning, match=f"not measured any more.*`data` failed: .*{words}"
        ):
            monitor.step(opt_state, params=WEIGHTS)
        monitor.step(opt_state, params=WEIGHTS)
        with pytest.raises(
            (TypeError, ValueError, NotImplementedError), match=words.split(": ")[-1]
        ):
            monitor.wrong_at(WEIGHTS)
    assert (monitor.last_record.step, monitor.last_record.wrong) == (2, None)


def test_the_last_step_is_recorded_where_the_parameters_are_gone():
    """It is read when the monitor is closed, and its third halving has nothing to look at."""
    params, opt_state = start(NOTED)
    settings = {"every": 2, "loss_fn": small_loss, "data": BATCH}
    monitor = lossscale.optax.Monitor(NOTED, PARAMS, opt_state, **settings)
    for spoiled in (False, False, True, True, True):
        params, opt_state, loss = step(NOTED, params, opt_state, np.inf if spoiled else 1.0)
        monitor.step(opt_state, loss, params=params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.close()
    assert (monitor.last_record.step, monitor.last_record.skipped) == (5, True)


# What is noted changes nothing else.


@pytest.mark.usefixtures("optimized")
def test_what_the_optimizer_does_is_the_same():
    runs = []
    for tx in (BARE, NOTED):
        params, opt_state = start(tx)
        for spoiled in (1.0, jnp.inf, 1.0, jnp.nan, 1.0):
            params, opt_state, _ = step(tx, params, opt_state, spoiled)
        runs.append(bits((params, getattr(opt_state, "loss_scaled", opt_state))))
    assert runs[0] == runs[1]
    assert int(opt_state.noted_steps) == 5
    assert (int(opt_state.notes.skip_step), float(opt_state.notes.skip_scale)) == (4, 4)
    # One NaN in the first row of the leaves in order: the bias, then the kernel.
    np.testing.assert_array_equal(opt_state.notes.nonfinite, [[0, 0], [0, 1]])


def test_eager_steps_note_the_same():
    tx, notes = lossscale.optax.noted(lossscale.optax.loss_scaled(optax.sgd(0.1), rule=RULE)), []
    grads = {"w": jnp.float32([8.0, jnp.inf])}
    for update in (tx.update, jax.jit(tx.update)):
        _, opt_state = update(grads, tx.init(grads), grads)
        notes.append(bits((opt_state.noted_steps, opt_state.notes)))
    assert notes[0] == notes[1]


def on_four_devices(tx, spec, opt_state, grads):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    states = jax.tree.map(lambda leaf: spec if leaf.ndim and leaf.shape[0] == 8 else P(), opt_state)
    update = jax.shard_map(
        lambda grads, state: tx.update(grads, state)[1],
        mesh=mesh,
        in_specs=(spec, states),
        out_specs=states,
    )
    return jax.jit(update)(grads, opt_state)


def test_devices_that_share_their_gradients_note_them():
    tx = lossscale.optax.noted(lossscale.optax.loss_scaled(optax.sgd(0.1), axis_name="d"))
    grads = {"w": jnp.ones(8).at[3].set(jnp.inf)}
    found = on_four_devices(tx, P(), tx.init(grads), grads)
    np.testing.assert_array_equal(found.notes.nonfinite, [[1, 0]])
    with pytest.raises(UnsupportedError, match="use jit over sharded arrays"):
        on_four_devices(tx, P("d"), tx.init(grads), grads)


def test_the_state_keeps_its_form_and_finds_its_names():
    state = NOTED.init(PARAMS)
    after = jax.eval_shape(NOTED.update, PARAMS, state, PARAMS)[1]
    like = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == like
    assert jax.eval_shape(NOTED.init, PARAMS) == jax.eval_shape(lambda: state)
    assert float(optax.tree.get(state, "loss_scale")) == 8
    assert int(optax.tree.get(state, "steps_skipped")) == 0
    # A name that a transformation of Optax has.
    assert optax.tree.get(state, "scale") is None


def test_a_state_without_notes_goes_in():
    opt_state = NOTED.init(PARAMS)._replace(loss_scaled=BARE.init(PARAMS))
    step(NOTED, jax.tree.map(jnp.copy, PARAMS), opt_state, 1.0)


# Mistakes.


def test_what_cannot_be_noted_is_refused():
    for given in (optax.adam(0.1), RULE, None):
        with pytest.raises(ArgumentTypeError, match=r"what lossscale\.optax\.loss_scaled returned"):
            lossscale.optax.noted(given)
    with pytest.raises(AlreadyWrappedError, match="notes already"):
        lossscale.optax.noted(NOTED)
    with pytest.raises(AlreadyWrappedError):
        lossscale.optax.loss_scaled(NOTED).init(PARAMS)
    with pytest.raises(ArgumentTypeError, match=r"_replace\(loss_scaled=state\)"):
        NOTED.update(PARAMS, BARE.init(PARAMS), PARAMS)
    with pytest.raises(ArgumentError, match="notes of 2 gradients, and there are 1 now"):
        NOTED.update({"w": jnp.ones(2)}, NOTED.init(PARAMS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tx": optax.adam(0.1)}, "`tx` must be what"),
        ({"opt_state": optax.adam(0.1).init(PARAMS)}, "with loss scaling"),
        ({"params": {"w": jnp.ones(2)}}, "has 1 arrays that are trained"),
        ({"every": 0}, "`every`"),
        ({"steps_before": -1}, "`steps_before`"),
        ({"on_floor": "shout"}, "`on_floor`"),
        ({"measure_every": 2}, "needs `data`"),
        ({"data": BATCH}, "needs `loss_fn`"),
    ],
)
def test_a_monitor_checks_its_arguments(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"tx": NOTED, "params": PARAMS, "opt_state": NOTED.init(PARAMS), **arguments}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        lossscale.optax.Monitor(**given)
    assert not list(tmp_path.iterdir())


def test_a_monitor_checks_what_it_is_shown(tmp_path):
    opt_state = BARE.init(PARAMS)
    monitor = lossscale.optax.Monitor(RULE, PARAMS, opt_state)
    with pytest.raises(ArgumentError, match=r"`loss` must be a scalar.*\(2,\)"):
        monitor.step(opt_state, jnp.ones(2))
    with pytest.raises(ArgumentError, match="`steps`"):
        monitor.step(opt_state, steps=0)
    replicated = jax.tree.map(lambda x: jnp.stack([x, x]), opt_state)
    with pytest.raises(ArgumentError, match="pass one replica"):
        monitor.step(replicated)
    with pytest.raises(ArgumentTypeError, match="with loss scaling"):
        monitor.step(PARAMS)
    assert monitor.last_record is None
    with pytest.raises(RecordingError):
        lossscale.optax.Monitor(RULE, PARAMS, opt_state, tmp_path / "no" / "folder" / "run.jsonl")


# What is not for the scale, and what is wrong at it.


def six_params():
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "first": jax.random.normal(keys[0], (4, 4)) / 2,
        "wide": jnp.eye(4) * 6e4,
        "head": jax.random.normal(keys[1], (4, 1)) / 2,
    }


def six_loss(kind, params, x, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    hidden = x.astype(dtype) @ params["first"]
    if kind in ("forward", "tanh"):
        hidden = (10 * hidden) @ params["wide"]
    if kind == "tanh":
        # The derivative of the square is infinite, times 0.
        hidden = jnp.tanh(hidden * hidden)
    out = hidden @ params["head"]
    if kind == "loss":
        large = out * 1e3 + 3e4
        return (large * large).mean()
    if kind == "backward":
        return out.astype(jnp.float32).mean() * 1e9
    if kind == "log":
        return jnp.log(out.astype(jnp.float32) * 0).mean()
    return jnp.square(out.astype(jnp.float32)).mean()


OVERFLOWS = r"cannot help: six_loss, line \d+ \(%s\) gives inf in float16, on the batch of step 3\."
SIX = [
    ("forward", OVERFLOWS % "dot_general"),
    ("tanh", OVERFLOWS % "dot_general"),
    ("loss", OVERFLOWS % "mul"),
    (
        "nan",
        r"cannot help: .*\(dot_general\) is not finite, in float32 too, on the batch of step 3",
    ),
    # What is computed in float32 always is not looked into.
    ("log", r"cannot help: the loss is -inf, in float32 too, on the batch of step 3"),
    ("backward", r"at the lowest loss scale, 1, .* DynamicScale\(min_scale=2\.0\*\*-24\)"),
]


@pytest.mark.parametrize(("kind", "words"), SIX, ids=[kind for kind, _ in SIX])
def test_what_is_not_the_scale_is_named(kind, words):
    params, loss_fn = six_params(), functools.partial(six_loss, kind)
    x = jax.random.normal(jax.random.key(0), (8, 4))
    bad = x * jnp.nan if kind == "nan" else x
    tx = lossscale.optax.loss_scaled(optax.sgd(1e-3), initial_scale=16)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        loss, grads = lossscale.optax.value_and_grad(loss_fn, argnums=0)(
            opt_state, params, bad, jnp.float16
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with (
        warnings.catch_warnings(record=True) as said,
        lossscale.optax.Monitor(tx, params, opt_state, loss_fn=loss_fn, data=x) as monitor,
    ):
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(8):
            params, opt_state, loss = step(params, opt_state)
            monitor.step(opt_state, loss, params=params, batch=bad)
    assert int(opt_state.steps_skipped) == 8
    messages = [str(each.message) for each in said if each.category is LossScaleWarning]
    assert re.search(words, messages[-1]), messages
    assert [line for line in messages[:-1] if "The loss of step 1 is" not in line] == []
    assert any("cannot help" in line for line in messages) == (kind != "backward")


# What a row belongs to goes by places, not by names, which may recur.

BESIDE = {
    "one name": ({"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, "a/b"),
    "a key called value": ({"attn": {"key": jnp.ones(2), "value": jnp.ones(2)}}, "attn/value"),
    "alone and called value": ({"attn": {"value": jnp.ones(2)}}, "attn/value"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_an_overflow_is_put_down_to_its_own_gradient(case):
    params, name = BESIDE[case]
    leaves, structure = jax.tree.flatten(params)
    tx = lossscale.optax.noted(lossscale.optax.loss_scaled(optax.sgd(0.1)))
    for row in range(len(leaves)):
        given = [leaf * jnp.inf if n == row else leaf for n, leaf in enumerate(leaves)]
        opt_state = tx.init(params)
        with lossscale.optax.Monitor(tx, params, opt_state) as monitor:
            _, opt_state = tx.update(jax.tree.unflatten(structure, given), opt_state, params)
            monitor.step(opt_state, 1.0)
        assert opt_state.notes.nonfinite[row].tolist() == [2, 0]
        assert int(opt_state.notes.nonfinite.sum()) == 2
        if row == len(leaves) - 1:
            assert str(monitor.last_record.nonfinite[0]).startswith(name)


def test_parameters_in_the_pair_of_lookahead_have_their_gradients_noted():
    inner = optax.lookahead(optax.adam(0.01), 5, 0.1)
    tx = lossscale.optax.noted(lossscale.optax.loss_scaled(inner))
    params = optax.LookaheadParams.init_synced({"v": jnp.ones(2), "w": jnp.ones(2)})
    gradients = {"v": jnp.ones(2), "w": jnp.array([jnp.inf, 1.0])}
    _, opt_state = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert opt_state.notes.nonfinite.tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]

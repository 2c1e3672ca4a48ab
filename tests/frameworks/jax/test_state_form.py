"""States that change their form in a step, and updates that do more than compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import lossscale.optax
from lossscale import FixedScale
from lossscale.errors import ArgumentError

GOOD, BAD = jnp.full(2, 0.5), jnp.full(2, jnp.nan)
COMPILED = pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])


def transformation(first, update):
    return optax.GradientTransformation(lambda params: first, update)


def after(inner, gradients, compiled=True, params=None):
    """The state inside after some steps at a scale of 1."""
    tx = lossscale.optax.loss_scaled(inner, initial_scale=1.0, dynamic_growth_steps=100)
    update = jax.jit(tx.update) if compiled else tx.update
    params = jnp.ones(2) if params is None else params
    state = tx.init(params)
    for gradient in gradients:
        state = state._replace(loss_scale=jnp.float32(1.0))
        _, state = update(gradient, state, params)
    return state.inner_state


def added_up(gradients, state, params=None):
    return gradients, {"sum": state["sum"] + gradients.sum() / 2}


@COMPILED
@pytest.mark.parametrize("first", [0, False, jnp.int32(0), np.bool_(False)], ids=repr)
def test_a_number_becomes_a_fraction(first, compiled):
    inner = transformation({"sum": first}, added_up)
    assert after(inner, [GOOD, BAD, GOOD], compiled)["sum"] == 1.0


def test_a_narrow_state_stays_narrow():
    def update(gradients, state, params=None):
        return gradients, state + gradients

    found = after(transformation(jnp.zeros(2, jnp.bfloat16), update), [GOOD, BAD, GOOD])
    assert (found.dtype, found.tolist()) == (jnp.bfloat16, [1.0, 1.0])


@dataclasses.dataclass(frozen=True)
class Phased:
    moment: object
    phase: int


jax.tree_util.register_dataclass(Phased, ["moment"], ["phase"])

CHANGING = {
    "gone": (
        {"a": jnp.ones(2), "b": jnp.ones(2)},
        lambda state: {"b": state["b"]},
        r"`\['a'\]` has shape \(2,\) before and None after",
    ),
    "shape": (
        jnp.ones(2),
        lambda state: jnp.stack([state, state]),
        r"shape \(2,\) before and \(2,",
    ),
    "static": (
        Phased(jnp.ones(2), 0),
        lambda state: Phased(state.moment + 1, 1 - state.phase),
        "a node or a non-array leaf changed",
    ),
    "new": (
        {"moment": None, "number": jnp.zeros(2)},
        lambda state: {"moment": jnp.ones(2), "number": state["number"] + 1},
        r"`\['moment'\]` has shape None before and \(2,\) after",
    ),
}


@COMPILED
@pytest.mark.parametrize("kind", CHANGING)
def test_a_state_that_cannot_be_kept_is_refused(kind, compiled):
    first, change, message = CHANGING[kind]
    inner = transformation(first, lambda g, state, params=None: (g, change(state)))
    with pytest.raises(ArgumentError, match=rf"changes the structure of its state.*{message}"):
        after(inner, [GOOD], compiled)


@COMPILED
@pytest.mark.parametrize("rule", [None, FixedScale(8.0)])
def test_measurements_of_optax_monitor_change_the_state(rule, compiled):
    inner = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.adam(0.1))
    tx = lossscale.optax.loss_scaled(inner, rule=rule)
    update = jax.jit(tx.update) if compiled else tx.update
    with pytest.raises(ArgumentError, match=r"`.*measurements.*norm.*` has shape None before"):
        update(GOOD, tx.init(GOOD), GOOD)


def logging(place, log):
    def noted(gradients, number):
        jax.debug.callback(lambda n: log.append(int(n)), number)
        return gradients

    def below(gradients, number):
        if place == "jit":
            return jax.jit(noted)(gradients, number)
        if place == "scan":
            noting = jax.lax.scan(lambda g, n: (noted(g, n), None), gradients, number[None])
            return noting[0]
        if place == "cond":
            return jax.lax.cond(number >= 0, noted, lambda g, n: g, gradients, number)
        return noted(gradients, number)

    return transformation(jnp.int32(0), lambda g, n, params=None: (below(g, n), n + 1))


@pytest.mark.parametrize("place", ["here", "jit", "scan", "cond"])
@pytest.mark.parametrize("around", [lambda inner: inner, lambda inner: optax.chain(inner, inner)])
def test_callbacks_do_not_run_on_skipped_steps(place, around):
    logs = {}
    for name, wrap in (
        ("ours", lambda inner: lossscale.optax.loss_scaled(inner, initial_scale=1.0)),
        ("theirs", lambda inner: optax.apply_if_finite(inner, 5)),
    ):
        log = logs[name] = []
        tx = wrap(around(logging(place, log)))
        update, state = jax.jit(tx.update), tx.init(jnp.ones(2))
        for gradients in (GOOD, BAD, GOOD):
            _, state = update(gradients, state, jnp.ones(2))
        jax.effects_barrier()
    assert sorted(logs["ours"]) == sorted(logs["theirs"])
    assert set(logs["ours"]) == {0, 1}


@pytest.mark.parametrize("nested", [False, True])
def test_names_of_scopes_reach_the_compiled_program(nested):
    def update(gradients, state, params=None):
        def noted(gradients, state):
            with jax.named_scope("MY_SCOPE"):
                return jnp.sin(gradients) * 2, jnp.cos(gradients) + state

        return jax.jit(noted)(gradients, state) if nested else noted(gradients, state)

    tx = lossscale.optax.loss_scaled(transformation(jnp.zeros(2), update))
    program = jax.jit(tx.update).lower(GOOD, tx.init(GOOD)).compile().as_text()
    assert "MY_SCOPE" in program


def test_a_program_for_any_number_of_parameters():
    [size] = export.symbolic_shape("n")
    tx = lossscale.optax.loss_scaled(optax.adam(0.01), initial_scale=1.0)

    def first(params, gradients):
        return tx.update(gradients, tx.init(params), params)[0]

    vector = jax.ShapeDtypeStruct((size,), jnp.float32)
    program = export.export(jax.jit(first))(vector, vector)
    np.testing.assert_allclose(program.call(jnp.ones(7), jnp.ones(7)), -0.01, rtol=1e-5)


def test_an_optimizer_that_looks_at_values_goes_on_after_a_skip():
    def update(gradients, state, params=None):
        norm = float(jnp.linalg.norm(gradients))
        return gradients * (1.0 if norm < 1 else 1 / norm), state

    tx = lossscale.optax.loss_scaled(transformation((), update), initial_scale=1.0)
    state = tx.init(jnp.ones(2))
    updates, state = tx.update(BAD, state)
    assert np.signbit(updates).all()
    updates, state = tx.update(GOOD, state)
    assert (int(state.steps_skipped), updates.tolist()) == (1, [0.5, 0.5])

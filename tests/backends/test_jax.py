"""Keras on JAX: transformations, what may not be compiled, and devices."""

import json
import warnings

import keras
import numpy as np
import pytest

import lossscale
import lossscale.errors
from backends.programs import made
from backends.support import run, wrapped

if keras.backend.backend() != "jax":
    pytest.skip("about JAX", allow_module_level=True)

import jax
import jax.numpy as jnp

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.parametrize("elements", [3, 2**14])
@pytest.mark.parametrize("state_axis", [None, 0])
def test_vmap_of_a_step_outside_jit(state_axis, elements):
    variable = keras.Variable(np.ones(elements, "float32"))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([variable])
    state = [v.value for v in optimizer.variables]
    if state_axis == 0:
        state = [jnp.stack([value] * 3) for value in state]
    scaled = jnp.stack([jnp.full(elements, 8.0), jnp.full(elements, jnp.inf), jnp.zeros(elements)])
    weights = jnp.ones((3, elements))
    optimizer.scale_loss(1.0)

    def step(state, gradient, weight):
        return optimizer.stateless_apply(state, [gradient], [weight])

    (found,), state = jax.vmap(step, in_axes=(state_axis, 0, 0))(state, scaled, weights)
    np.testing.assert_array_equal(found[:, 0], [0.5, 1.0, 1.0])
    named = dict(zip([v.name for v in optimizer.variables], state, strict=True))
    np.testing.assert_array_equal(named["dynamic_scale"], [8.0, 4.0, 8.0])
    np.testing.assert_array_equal(named["steps_skipped"], [0, 1, 0])


def test_a_scale_that_a_compiled_function_would_keep_is_still_an_error():
    variable = keras.Variable(np.ones(2**14, "float32"))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([variable])
    optimizer.scale_loss(1.0)
    step = jax.jit(lambda gradient: optimizer.apply([gradient], [variable]))
    with pytest.raises(lossscale.errors.UnsupportedError, match="must come in as an argument"):
        step(jnp.ones(2**14))


@pytest.mark.parametrize("form", ["callable", "array"])
@pytest.mark.parametrize("verb", ["minimize", "get_gradients", "get_updates"])
def test_a_loss_of_variables_is_refused_with_what_to_do(verb, form):
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([variable])
    loss = {"callable": lambda: jnp.sum(variable.value), "array": jnp.ones(())}[form]
    variables = {"var_list" if verb == "minimize" else "params": [variable]}
    state = [np.asarray(v.value) for v in optimizer.variables]
    with pytest.raises(
        lossscale.errors.UnsupportedError,
        match=r"gradients .*are taken with jax\.grad.*stateless_apply",
    ):
        getattr(optimizer, verb)(loss=loss, **variables)
    for before, after in zip(state, optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, after.value)


@pytest.mark.parametrize("verb", ["scale_loss", "get_scaled_loss"])
def test_a_scale_that_would_be_baked_in_is_an_error(verb):
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    scale = getattr(optimizer, verb)

    def loss(value):
        return scale((value**2).sum())

    np.testing.assert_array_equal(jax.grad(loss)(np.ones(2, "float32")), [2.0**11] * 2)
    with pytest.raises(NotImplementedError, match="StatelessScope"):
        jax.jit(jax.grad(loss))(np.ones(2, "float32"))


def test_a_fixed_scale_may_be_baked_in():
    optimizer = lossscale.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), dynamic=False, initial_scale=8.0
    )
    assert jax.jit(optimizer.scale_loss)(np.float32(1.0)) == 8.0


def test_gradients_out_of_a_compiled_function_are_scaled_on_every_call():
    run = made()
    optimizer = run.optimizer

    @jax.jit
    def scaled_gradients(state):
        with keras.StatelessScope(list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(run.loss())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            run.take(scaled_gradients([v.value for v in optimizer.variables]))
            run.calls("apply:a apply:b")
    assert run.gone() == {"a": -3.0, "b": 0.75}


TWO_DEVICES = """
import json
import keras, numpy as np
from backends.support import arrays, data, model_with, status, wrapped

devices = keras.distribution.list_devices("cpu")
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
optimizer = wrapped(keras.optimizers.Adam(0.01))
model = model_with(optimizer)
x, y = data()
x[13] = np.nan  # one row, on one of the devices
model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
state = [v.value for v in model.trainable_variables + list(optimizer.variables)]
copies = [np.array([np.array(s.data) for s in value.addressable_shards]) for value in state]
print(json.dumps({
    "devices": len(devices),
    "same": all((copy[0] == copy[1]).all() for copy in copies),
    "finite": all(np.isfinite(w).all() for w in arrays(model.trainable_variables)),
    **status(optimizer)._asdict(),
}))
"""


def test_an_overflow_on_one_of_two_devices_skips_the_step_on_both():
    printed = run(TWO_DEVICES, "jax", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert json.loads(printed.strip().splitlines()[-1]) == {
        "devices": 2,
        "same": True,
        "finite": True,
        "scale": 2.0**11,
        "good_steps": 0,
        "skipped": 1,
        "last_skipped": False,
        "iterations": 8,
        "applied": 7,
    }


class Noting(keras.optimizers.SGD):
    """Keeps a fraction in a variable of whole numbers, beside one of fractions."""

    def build(self, variables):
        super().build(variables)
        self.whole = self.add_variable((), dtype="int32", name="whole")
        self.fraction = self.add_variable((), dtype="float32", name="fraction")

    def update_step(self, gradient, variable, learning_rate):
        self.whole.assign(gradient[0])
        self.fraction.assign(gradient[0])
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.filterwarnings("ignore:.*the loss was never scaled")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_state_inside_keeps_the_form_that_it_has_without_loss_scaling(compiled):
    found = []
    for wrap in (lambda inner: inner, lambda inner: wrapped(inner, initial_scale=8.0)):
        weight, inner = keras.Variable([1.0, 2.0]), Noting(0.5, momentum=0.5)
        optimizer = wrap(inner)
        optimizer.build([weight])
        factor = 1.0 if optimizer is inner else 8.0
        given = [2.75] if optimizer is inner else [np.nan, 2.75, np.inf]
        step = jax.jit(optimizer.stateless_apply) if compiled else optimizer.stateless_apply
        state, values = [v.value for v in optimizer.variables], [weight.value]
        for number in given:
            # The scale is halved by the first of them.
            scale = factor / 2 if number == 2.75 and factor > 1 else factor
            values, state = step(state, [jnp.full(2, number * scale)], values)
        named = dict(zip((v.path for v in optimizer.variables), state, strict=True))
        found.append([named[v.path] for v in inner.variables])
    for expected, kept in zip(*found, strict=True):
        assert (kept.dtype, kept.tolist()) == (expected.dtype, expected.tolist())

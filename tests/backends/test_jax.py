"""Keras on JAX: transformations, what may not be compiled, and devices."""

import functools
import json

import keras
import numpy as np
import pytest

import lossscale
from backends.programs import made
from backends.support import arrays, assert_same, run, wrapped
from lossscale.errors import ArgumentError, UnsupportedError

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


def test_minimize_trains_as_fit_does_and_keeps_what_a_loss_assigns():
    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activity_regularizer="l2"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )

    x = np.linspace(-1.0, 1.0, 64, dtype="float32").reshape(16, 4)
    y = x.sum(1, keepdims=True)
    plain, ours = model(), model()
    plain.compile(keras.optimizers.SGD(0.05), "mse")
    plain.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
    optimizer = wrapped(keras.optimizers.SGD(0.05))

    def loss():
        losses = keras.losses.mean_squared_error(y, ours(x, training=True))
        return keras.ops.mean(losses) + sum(ours.losses)

    for _ in range(4):
        optimizer.minimize(loss, ours.trainable_variables)
    # Averages of the batch normalization, and the seed of the dropout.
    for expected, found in zip(plain.variables, ours.variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
    assert optimizer.iterations == 4


def test_minimize_in_a_compiled_function_takes_the_state_as_an_argument():
    variable, optimizer = keras.Variable(1.0), wrapped(keras.optimizers.SGD(0.25))
    optimizer.build([variable])
    variables = [variable, *optimizer.variables]

    def step(values):
        with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
            optimizer.minimize(lambda: variable**2, [variable])
        return [scope.get_current_value(each) for each in variables]

    values = [each.value for each in variables]
    for _ in range(2):
        values = jax.jit(step)(values)
    assert values[0] == 0.25
    assert variable.numpy() == 1.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda o, v: o.minimize(v.value**2, [v]), UnsupportedError, "callable"),
        (lambda o, v: o.get_updates(v.value, [v]), UnsupportedError, "callable"),
        (lambda o, v: o.minimize(lambda: v**2, [v], tape=object()), ArgumentError, "tape"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_an_error_and_changes_nothing(call, error, message):
    variable, optimizer = keras.Variable(1.0), wrapped(keras.optimizers.SGD(0.5))
    optimizer.build([variable])
    state = arrays([variable, *optimizer.variables])
    with pytest.raises(error, match=message):
        call(optimizer, variable)
    assert_same(state, arrays([variable, *optimizer.variables]))


READ_DURING_FIT = {
    "loss_scale": lambda o: o.loss_scale,
    "scale_loss": lambda o: o.scale_loss(1.0),
    "get_scaled_loss": lambda o: o.get_scaled_loss(1.0),
    "get_unscaled_gradients": lambda o: o.get_unscaled_gradients([jnp.ones(1)]),
    "steps_skipped": lambda o: o.steps_skipped,
    "last_step_skipped": lambda o: o.last_step_skipped,
    "iterations": lambda o: int(o.iterations),
    "dynamic_counter": lambda o: int(o.dynamic_counter),
    "dynamic_scale": lambda o: float(o.dynamic_scale),
}


def test_what_has_no_value_while_fit_runs_is_an_error_that_says_why():
    optimizer = wrapped(keras.optimizers.SGD(0.1))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    found = {}

    def read(batch, logs):
        for name, ask in READ_DURING_FIT.items():
            try:
                found[name] = ask(optimizer)
            except UnsupportedError as error:
                found[name] = str(error)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=read)
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[callback])
    assert set(found) == set(READ_DURING_FIT)
    assert all("self.model.optimizer" in message for message in found.values())
    assert int(optimizer.iterations) == 1


BAKED_IN = {
    "scale_loss": lambda o, v, value: o.scale_loss(value.sum()),
    "get_scaled_loss": lambda o, v, value: o.get_scaled_loss(value.sum()),
    "apply": lambda o, v, value: o.apply([value], [v]),
    "minimize": lambda o, v, value: o.minimize(lambda: v.value.sum(), [v]),
}


@pytest.mark.parametrize("verb", BAKED_IN)
def test_a_scale_that_would_be_baked_in_is_an_error(verb):
    variable, optimizer = keras.Variable(np.ones(2**14)), wrapped(keras.optimizers.SGD(0.5))
    optimizer.build([variable])
    call = functools.partial(BAKED_IN[verb], optimizer, variable)
    scaled = optimizer.scale_loss(jnp.ones(2**14))
    with pytest.raises(UnsupportedError, match=r"StatelessScope|must come in as an argument"):
        jax.jit(call)(scaled)
    call(scaled)


def test_gradients_out_of_a_compiled_function_are_scaled_on_every_call():
    run = made()
    optimizer = run.optimizer

    @jax.jit
    def scaled_gradients(state):
        with keras.StatelessScope(list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(run.loss())

    # Warnings are errors.
    for _ in range(3):
        run.take(scaled_gradients([v.value for v in optimizer.variables]))
        run.calls("apply:a apply:b")
    assert run.gone() == {"a": -3.0, "b": 0.75}


TWO_DEVICES = """
import json
import keras, numpy as np
import lossscale
from backends.support import arrays, data, seed, status, wrapped

devices = keras.distribution.list_devices("cpu")
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))


def trained(x, y):
    seed(0)
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = lossscale.keras.guard(keras.Sequential(layers))
    model.compile(wrapped(keras.optimizers.Adam(0.01)), loss="mse", jit_compile=True)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


x, y = data()
x[13] = np.nan  # one row, on one of the devices
model = trained(x, y)
without = trained(*(np.delete(each, slice(8, 16), 0) for each in (x, y)))
state = [v.value for v in model.weights + list(model.optimizer.variables)]
copies = [np.array([np.array(s.data) for s in value.addressable_shards]) for value in state]
print(json.dumps({
    "devices": len(devices),
    "same": all((copy[0] == copy[1]).all() for copy in copies),
    "as_without": all(map(np.array_equal, arrays(model.weights), arrays(without.weights))),
    **status(model.optimizer)._asdict(),
}))
"""


def test_an_overflow_on_one_of_two_devices_skips_the_guarded_step_on_both():
    printed = run(TWO_DEVICES, "jax", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert json.loads(printed.strip().splitlines()[-1]) == {
        "devices": 2,
        "same": True,
        "as_without": True,
        "scale": 2.0**11,
        "counter": 0,
        "skipped": 1,
        "last": False,
        "iterations": 8,
        "applied": 7,
    }

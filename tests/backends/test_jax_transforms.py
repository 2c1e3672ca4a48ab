"""Steps inside the transformations of JAX that compile nothing."""

import keras
import numpy as np
import pytest

import lossscale
import lossscale.errors

if keras.backend.backend() != "jax":
    pytest.skip("transformations of JAX", allow_module_level=True)

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
    with pytest.raises(lossscale.errors.UnsupportedError, match=r"gradients .*are taken with jax"):
        getattr(optimizer, verb)(loss=loss, **variables)
    for before, after in zip(state, optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, after.value)

import keras
import numpy as np
import pytest

import lossscale
from backends.support import BACKEND, arrays, number, run, status, wrapped

pytestmark = pytest.mark.usefixtures("compiled_quickly")

on_jax = pytest.mark.skipif(BACKEND != "jax", reason="about JAX")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="about PyTorch")


def test_apply_outside_of_any_function():
    # Keras' own class fails here on JAX.
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    variable = keras.Variable([1.0, 2.0])
    for gradient in (0.5, np.nan, 0.25):
        scaled = optimizer.scale_loss(keras.ops.convert_to_tensor([gradient, 0.0]))
        optimizer.apply([scaled], [variable])
    np.testing.assert_array_equal(arrays([variable])[0], [0.25, 2.0])
    assert status(optimizer)["skipped"] == 1


@pytest.mark.skipif(BACKEND == "jax", reason="there the state goes through stateless_apply")
def test_apply_gradients_returns_the_number_of_steps():
    # Keras' own class returns a counter of its own, which stays 0.
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    variable = keras.Variable([1.0])
    for expected, value in ((1, 1.0), (2, np.nan)):
        scaled = optimizer.scale_loss(keras.ops.convert_to_tensor([value]))
        assert number(optimizer.apply_gradients([(scaled, variable)])) == expected


@on_jax
@pytest.mark.parametrize("verb", ["scale_loss", "get_scaled_loss"])
def test_a_scale_that_would_be_baked_in_is_an_error(verb):
    import jax

    optimizer = wrapped(keras.optimizers.SGD(1.0))
    scale = getattr(optimizer, verb)

    def loss(value):
        return scale((value**2).sum())

    np.testing.assert_array_equal(jax.grad(loss)(np.ones(2, "float32")), [2.0**11] * 2)
    with pytest.raises(NotImplementedError, match="StatelessScope"):
        jax.jit(jax.grad(loss))(np.ones(2, "float32"))


@on_jax
def test_a_fixed_scale_may_be_baked_in():
    import jax

    optimizer = lossscale.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), dynamic=False, initial_scale=8.0
    )
    assert jax.jit(optimizer.scale_loss)(np.float32(1.0)) == 8.0


@on_jax
def test_the_scale_of_a_compiled_loop_moves():
    # With Keras' own class and scale_loss outside of a StatelessScope, the steps become
    # 1, 1, 1/2, 1/2, 1/4, 1/4 of their size.
    import jax

    optimizer = wrapped(keras.optimizers.SGD(1.0), growth_interval=2)
    variable = keras.Variable([0.0])
    optimizer.build([variable])

    def loss(values, state):
        mapping = list(zip(optimizer.variables, state, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(values[0].sum())

    @jax.jit
    def step(values, state):
        return optimizer.stateless_apply(state, jax.grad(loss)(values, state), values)

    values, state = [variable.value], [v.value for v in optimizer.variables]
    seen = []
    for _ in range(6):
        values, state = step(values, state)
        seen.append(float(values[0][0]))
    assert seen == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    scale = state[[v.name for v in optimizer.variables].index("dynamic_scale")]
    assert float(scale) == 2.0**13


@on_jax
@pytest.mark.parametrize("verb", ["minimize", "get_gradients", "get_updates"])
def test_verbs_that_need_a_tape_say_what_to_do(verb):
    optimizer = wrapped(keras.optimizers.SGD(1.0))
    variable = keras.Variable([1.0])
    with pytest.raises(NotImplementedError, match=r"jax\.grad.*stateless_apply"):
        getattr(optimizer, verb)(lambda: variable.value.sum(), [variable])
    assert status(optimizer)["iterations"] == 0


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
    **status(optimizer),
}))
"""


@on_jax
def test_an_overflow_on_one_of_two_devices_skips_the_step_on_both():
    import json

    printed = run(
        TWO_DEVICES,
        "jax",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
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


@on_torch
def test_the_documented_verbs_work_on_pytorch():
    import torch

    optimizer = wrapped(keras.optimizers.SGD(0.25))
    weight = keras.Variable(1.0)
    optimizer.minimize(lambda: weight.value**2, [weight])
    assert number(weight) == 0.5
    scaled = optimizer.get_scaled_loss(weight.value**2)
    gradients = torch.autograd.grad(scaled, [weight.value])
    optimizer.apply_gradients([(optimizer.get_unscaled_gradients(gradients)[0], weight)])
    assert number(weight) == 0.25
    (gradient,) = optimizer.get_gradients(weight.value**2, [weight])
    assert number(gradient) == 0.5
    optimizer.get_updates(lambda: weight.value**2, [weight])
    assert number(weight) == 0.125
    with pytest.raises(ValueError, match="var_list"):
        optimizer.minimize(lambda: weight.value**2)


@on_torch
def test_backward_and_apply_work_on_pytorch():
    optimizer = wrapped(keras.optimizers.SGD(0.25))
    weight = keras.Variable(1.0)
    for expected in (0.5, 0.25):
        optimizer.scale_loss(weight.value**2).backward()
        optimizer.apply([weight.value.grad], [weight])
        weight.value.grad = None
        assert number(weight) == expected


@on_torch
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_step_waits_for_the_host_once_at_most(dynamic, monkeypatch):
    import torch

    optimizer = (
        wrapped(keras.optimizers.Adam(0.01))
        if dynamic
        else lossscale.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), dynamic=False, initial_scale=8
        )
    )
    variables = [keras.Variable(np.ones((4, 4), "float32")) for _ in range(5)]
    gradients = [torch.ones(4, 4) for _ in variables]
    optimizer.scale_loss(1.0)
    optimizer.apply(gradients, variables)
    lists = []
    tolist = torch.Tensor.tolist
    # On a CPU that is no operation the profiler sees.
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append(1) or tolist(self))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.apply(gradients, variables)
    counts = {event.key: event.count for event in profile.key_averages()}
    waits = counts.get("aten::_local_scalar_dense", 0) + len(lists)
    assert waits == (1 if dynamic else 0)


@on_torch
def test_own_gradients_are_left_as_they_are_and_divided_each_time():
    optimizer = wrapped(keras.optimizers.SGD(0.25))
    weight = keras.Variable(1.0)
    optimizer.scale_loss(weight.value**2).backward()
    gradient = weight.value.grad
    for expected in (0.5, 0.0):
        # The second time it is handed in as it stands.
        optimizer.apply([gradient], [weight])
        assert number(weight) == expected
    assert number(gradient) == 2.0**11
    gradient.fill_(2.0**12)
    optimizer.apply([gradient], [weight])
    assert number(gradient) == 2.0**12
    assert number(weight) == -1.0


@on_torch
def test_gradients_of_others_are_left_as_they_are():
    import torch

    optimizer = wrapped(keras.optimizers.SGD(0.25))
    variables = [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]
    gradients = [torch.full((3,), 2.0**10), torch.full((2,), 2.0**10, dtype=torch.float16)]
    optimizer.scale_loss(1.0)
    optimizer.apply(gradients, variables)
    assert all((gradient == 2.0**10).all() for gradient in gradients)
    assert arrays(variables)[0].tolist() == [0.75] * 3
    assert arrays(variables)[1].tolist() == [0.75] * 2

"""Settings, counters, rules of the user's, and the errors of wrapping."""

import keras
import pytest
import tensorflow as tf

import lossscale
from kerases import INF, assert_same, values
from lossscale import DynamicScale
from tensorflow_steps import gradients_for, plain_step, step_by_scale_loss, variables, wrapped

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


class Failing(SGD):
    """Has a property that cannot be read."""

    @property
    def gauge(self):
        raise AttributeError("no gauge before the first step")


def of_several():
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD(), {".*b": Adam()}))


@pytest.mark.parametrize(
    ("made", "name", "inside"),
    [
        (Failing, "gauge", "gauge"),
        (of_several, "learning_rate", "learning_rate"),
        (of_several, "lr", "learning_rate"),
    ],
)
def test_what_a_property_of_the_inner_optimizer_says_is_said(made, name, inside):
    optimizer = wrapped(made())
    with pytest.raises(AttributeError) as expected:
        getattr(optimizer.inner_optimizer, inside)
    with pytest.raises(AttributeError) as said:
        getattr(optimizer, name)
    assert str(said.value) == str(expected.value)
    assert not hasattr(optimizer, name)


def test_an_optimizer_of_several_has_the_slots_and_the_counters_of_its_parts():
    first, second = keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")
    parts = keras.optimizers.OptimizerMap(SGD(momentum=0.5), {".*b": Adam()})
    optimizer = wrapped(keras.optimizers.MultiOptimizer(parts))
    optimizer.build([first, second])
    [_, adam] = sorted(
        optimizer.inner_optimizer.optimizers, key=lambda part: isinstance(part, Adam)
    )
    assert optimizer.get_slot(second, "m") is adam._momentums[0]
    assert optimizer.get_slot(second, "v") is adam._velocities[0]
    assert optimizer.get_slot(first, "momentum") is not adam._momentums[0]
    with pytest.raises(KeyError, match="no slot 'v'"):
        optimizer.get_slot(first, "v")
    optimizer.iterations = 7
    assert [int(part.iterations) for part in optimizer.inner_optimizer.optimizers] == [7, 7]
    assert int(optimizer.iterations) == 7


def test_loss_scale_factor_is_none_and_cannot_be_set():
    optimizer = wrapped()
    assert optimizer.loss_scale_factor is None
    with pytest.raises(TypeError, match="loss_scale_factor=None"):
        optimizer.loss_scale_factor = None
    with pytest.raises(ValueError, match="loss_scale_factor=64"):
        optimizer.loss_scale_factor = 64
    assert optimizer.inner_optimizer.loss_scale_factor is None
    inner = SGD(loss_scale_factor=64.0)
    with pytest.raises(ValueError, match=r"initial_scale=64\.0"):
        wrapped(inner)
    assert inner.loss_scale_factor == 64.0


def test_counters_are_numbers_on_replicas(two_replicas):
    with two_replicas.scope():
        optimizer, targets = wrapped(initial_scale=8), variables([0.0])
        optimizer.build(targets)

    @tf.function
    def step(gradient):
        two_replicas.run(step_by_scale_loss, args=(optimizer, targets, [gradient]))

    for gradient in (1.0, INF, 1.0):
        step(tf.constant([gradient]))
    for counter, count in (
        (optimizer.iterations, 3),
        (optimizer.dynamic_counter, 1),
        (optimizer.steps_skipped, 1),
    ):
        assert (int(counter), float(counter), bool(counter)) == (count, count, True)
    assert float(optimizer.dynamic_scale) == 4
    assert (int(optimizer.last_step_skipped), bool(optimizer.last_step_skipped)) == (0, False)
    assert "loss scale 4, 1 of 3 steps skipped" in repr(optimizer)
    assert "value=3" in repr(optimizer.iterations)


def test_a_used_optimizer_can_be_wrapped_and_goes_on():
    batches = gradients_for(variables([0.0]), 6)
    results = []
    for make in (lambda inner: inner, wrapped):
        targets, inner = variables([0.0]), Adam(0.1)
        inner.build(targets)
        for gradients in batches[:3]:
            plain_step(inner, targets, gradients)
        optimizer = make(inner)
        assert int(optimizer.iterations) == 3
        step = plain_step if optimizer is inner else step_by_scale_loss
        for gradients in batches[3:]:
            step(optimizer, targets, gradients)
        assert int(optimizer.iterations) == 6
        results.append(values([*targets, *inner.variables]))
    assert_same(*results)


class Patient(DynamicScale):
    """A class that nothing knows by its name."""


def test_a_rule_is_found_among_those_that_keras_knows_or_named_in_an_error():
    @keras.saving.register_keras_serializable(package="settings_test")
    class Registered(Patient):
        pass

    from_config = lossscale.LossScaleOptimizer.from_config
    loaded = from_config(wrapped(rule=Registered(8.0)).get_config())
    assert loaded.rule == Registered(8.0)
    with pytest.raises(ValueError, match=r"custom_objects=\{'Patient': Patient\}"):
        from_config(wrapped(rule=Patient(8.0)).get_config())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"rule": 128}, TypeError, "must be a scaling rule"),
        ({"rule": lossscale.DynamicScale}, TypeError, "must be a scaling rule"),
        ({"rule": DynamicScale(), "initial_scale": 8}, ValueError, "`rule` excludes `dynamic`"),
    ],
    ids=str,
)
def test_wrong_arguments_are_errors_that_leave_the_optimizer_free(arguments, error, match):
    inner = SGD()
    with pytest.raises(error, match=match):
        wrapped(inner, **arguments)
    assert wrapped(inner).inner_optimizer is inner


def test_the_wrapper_is_no_bigger_than_it_says():
    optimizer = wrapped(Adam())
    # Keras' own class has four, the third an integer: no list of its numbers is taken for ours.
    own = ["iteration", "step_counter", "dynamic_scale", "steps_skipped", "last_step_skipped"]
    assert [v.name for v in optimizer.variables] == [*own, "iteration", "learning_rate"]
    assert optimizer.variables() == optimizer.variables

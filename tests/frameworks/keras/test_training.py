"""Training with the optimizer gives what training without loss scaling gives, bit for bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerases import INF, assert_same, loss_scale_warnings, values
from tensorflow_steps import (
    gradients_for,
    loss_with_gradients,
    plain_step,
    step_by_apply,
    variables,
    wrapped,
)

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam

START = (np.linspace(-1, 1, 6).reshape(2, 3), np.array([0.5, -0.25]))


@pytest.mark.parametrize("count", [1, 2])
def test_the_branch_is_one_operation_where_the_process_has_one_device(monkeypatch, count):
    devices = tf.config.list_logical_devices()
    assert len(devices) == 2
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices[:count])
    targets = []
    for number in (0, count - 1):
        with tf.device(devices[number].name):
            targets += variables([1.0])
    optimizer = wrapped(SGD(0.5, momentum=0.5))
    optimizer.build(targets)
    step = tf.function(
        lambda gradients: optimizer.minimize(
            lambda: loss_with_gradients(targets, gradients), targets
        ),
        autograph=False,
    )
    gradients = [tf.constant([0.5]), tf.constant([1.0])]
    nodes = step.get_concrete_function(gradients).graph.as_graph_def().node
    branches = [node for node in nodes if node.op in ("If", "StatelessIf")]
    # TensorFlow rewrites one that it may to a switch for each tensor, each on its device.
    assert [node.attr["_lower_using_switch_merge"].b for node in branches] == [count == 2]
    step(gradients)
    assert [target.numpy().item() for target in targets] == [0.75, 0.5]


# With the emitters of XLA that users have; tests/conformance compiles in less time.
@pytest.mark.parametrize(
    "inner",
    [
        lambda: SGD(0.1, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=3),
        lambda: keras.optimizers.AdamW(
            0.01, weight_decay=0.05, clipnorm=0.7, gradient_accumulation_steps=3
        ),
    ],
    ids=["ema", "accumulation_clipnorm_decay"],
)
def test_xla_function_gives_the_weights_of_the_plain_optimizer_in_xla(inner):
    def train(optimizer, step_of):
        targets = variables(*START)
        optimizer.build(targets)
        step = tf.function(lambda *g: step_of(optimizer, targets, g), jit_compile=True)
        for gradients in gradients_for(START, 5):
            step(*map(tf.constant, gradients))
        return values(targets)

    assert_same(train(wrapped(inner()), step_by_apply), train(inner(), plain_step))


def test_a_variable_that_is_overwritten_with_its_gradient_is_not_unscaled():
    plain, statistic = variables([1.0], [2.0])
    statistic.overwrite_with_gradient = True
    optimizer = wrapped(SGD(0.5))
    optimizer.build([plain, statistic])
    scaled = optimizer.scale_loss(tf.constant([0.25]))
    optimizer.apply_gradients([(scaled, plain), (tf.constant([7.0]), statistic)])
    assert (plain.numpy().item(), statistic.numpy().item()) == (0.875, 7.0)
    scaled = optimizer.scale_loss(tf.constant([INF]))
    optimizer.apply_gradients([(scaled, plain), (tf.constant([9.0]), statistic)])
    assert (plain.numpy().item(), statistic.numpy().item()) == (0.875, 7.0)


def test_a_mistake_moves_the_weight_by_another_factor_with_one_warning():
    (target,) = variables([0.0])
    optimizer = wrapped(initial_scale=4.0)
    with loss_scale_warnings() as messages:
        for _ in range(3):
            scaled = optimizer.get_scaled_loss(tf.constant([1.0]))
            optimizer.apply(optimizer.get_unscaled_gradients([scaled]), [target])
    assert target.numpy().tolist() == [-3 * 0.25]
    [message] = messages
    assert "get_unscaled_gradients() already did" in message

"""Loops of TensorFlow in the shapes of public programs, for Keras 3 and both families of tf_keras.

Each takes batches and what makes an optimizer, and returns the weights that it ends with. It asks
with `isinstance` whether to scale, as those programs do, so it runs without loss scaling as well.
That is the oracle, bit for bit: their own loop, with the framework's own optimizer, on the batches
that are finite. One batch overflows in the runs with loss scaling.
"""

import numpy as np
import pytest
import tensorflow as tf

import lossscale


def gradients_of(optimizer, weights, batch):
    """A step's gradients, by the documented verbs where there is a loss scale."""
    x, y = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.linalg.matvec(x, weights[0]) + weights[1] - y) ** 2)
        if isinstance(optimizer, lossscale.LossScaleOptimizer):
            loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(loss, weights)
    if isinstance(optimizer, lossscale.LossScaleOptimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
    return gradients


def train_on(optimizer, weights, batch):
    """A step of the loop of the guides."""
    gradients = gradients_of(optimizer, weights, batch)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


def new_weights():
    return [tf.Variable([0.5, -0.25, 1.0]), tf.Variable(0.125)]


def two_optimizers_under_a_distributed_wrapper(make, optimizers, batches):
    """As with Horovod: a subclass made of the optimizer's own class reduces what it applies."""

    class Reducing:
        def apply_gradients(self, grads_and_vars, **kwargs):
            reduced = [(gradient * 0.5, variable) for gradient, variable in grads_and_vars]
            return super(self.__class__, self).apply_gradients(reduced, **kwargs)

    def distributed(optimizer):
        name, base = type(optimizer).__name__, type(optimizer)
        cls = type(name, (base,), {"apply_gradients": Reducing.apply_gradients})
        return cls.from_config(optimizer.get_config())

    weights = new_weights()
    first = make(distributed(optimizers.SGD(0.125, momentum=0.5)))
    second = make(distributed(optimizers.SGD(0.25)))

    @tf.function
    def step(x, y):
        for index, optimizer in enumerate((first, second)):
            gradients = gradients_of(optimizer, weights, (x + float(index), y))
            optimizer.apply_gradients([(gradients[index], weights[index])])

    for batch in batches:
        step(*batch)
    return weights


def accumulators_in_a_cond(make, optimizers, batches):
    """Gradients are added up in variables, and applied every second batch, inside of a graph."""
    weights, optimizer = new_weights(), make(optimizers.SGD(0.125, momentum=0.5))
    sums = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]
    count = tf.Variable(0, dtype=tf.int64)
    optimizer.build(weights) if hasattr(optimizer, "build") else None

    def apply():
        optimizer.apply_gradients([(s / 2.0, w) for s, w in zip(sums, weights, strict=True)])
        for each in sums:
            each.assign(tf.zeros_like(each))
        return tf.constant(True)

    @tf.function
    def step(x, y):
        gradients = gradients_of(optimizer, weights, (x, y))
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        count.assign_add(1)
        tf.cond(count % 2 == 0, apply, lambda: tf.constant(False))

    for batch in batches:
        step(*batch)
    return weights


def a_moving_average_inside(make, optimizers, batches):
    """The optimizer inside averages in its own `apply_gradients`."""

    class Averaging(optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = list(grads_and_vars)
            result = super().apply_gradients(pairs, **kwargs)
            for average, (_, variable) in zip(averages, pairs, strict=True):
                average.assign(0.5 * average + 0.5 * tf.convert_to_tensor(variable))
            return result

    weights = new_weights()
    averages = [tf.Variable(weight, trainable=False) for weight in weights]
    optimizer = make(Averaging(0.125))
    optimizer.build(weights) if hasattr(optimizer, "build") else None

    step = tf.function(lambda *batch: train_on(optimizer, weights, batch))
    for batch in batches:
        step(*batch)
    return [*weights, *averages]


def an_optimizer_looked_for_inside(make, optimizers, batches):
    """Wrappers are taken off one by one, to set the learning rate of what is inside."""
    weights, optimizer = new_weights(), make(optimizers.SGD(0.5))
    inside = optimizer
    while hasattr(inside, "_optimizer"):
        inside = inside._optimizer
    inside.learning_rate = 0.125
    for batch in batches:
        train_on(optimizer, weights, batch)
    return weights


# With how many batches there are to a step.
PROGRAMS = {
    two_optimizers_under_a_distributed_wrapper: 1,
    accumulators_in_a_cond: 2,
    a_moving_average_inside: 1,
    an_optimizer_looked_for_inside: 1,
}

BAD = 2


def batches_of(step_of_batches):
    """Returns batches of which one is spoiled, and those without the step that it is in."""
    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(4, 3)).astype("f"), random.normal(size=4).astype("f"))
        for _ in range(8)
    ]
    first = BAD - BAD % step_of_batches
    good = [*batches[:first], *batches[first + step_of_batches :]]
    x, y = batches[BAD]
    batches[BAD] = x, y * np.float32(np.inf)
    return [[tuple(map(tf.constant, batch)) for batch in group] for group in (batches, good)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        assert a.tobytes() == b.tobytes(), (a, b)


def of_2_4(optimizer):
    return lossscale.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)


def of_2_3(optimizer):
    loss_scale = lossscale.experimental.DynamicLossScale(8.0, 3)
    return lossscale.experimental.LossScaleOptimizer(optimizer, loss_scale)


@pytest.mark.parametrize("wrap", [of_2_4, of_2_3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_of_tensorflow(program, optimizers, wrap):
    batches, good = batches_of(PROGRAMS[program])
    expected = program(lambda optimizer: optimizer, optimizers, good)
    found = program(wrap, optimizers, batches)
    assert_same(found, expected)

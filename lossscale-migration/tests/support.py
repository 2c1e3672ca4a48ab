"""Optimizers of tf_keras as an independent witness, and what the tests of old files share."""

import pathlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import lossscale

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
WITNESS = tf_keras.mixed_precision.LossScaleOptimizer
FAMILIES = {"legacy": tf_keras.optimizers.legacy, "new": tf_keras.optimizers}

# Constructor arguments that hold in both families of tf_keras optimizers and in Keras 3.
OPTIMIZERS = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.7}),
    "nesterov": ("SGD", {"momentum": 0.7, "nesterov": True}),
    "adam": ("Adam", {"beta_1": 0.8, "beta_2": 0.95}),
    "amsgrad": ("Adam", {"amsgrad": True, "beta_2": 0.5}),
    "rmsprop": ("RMSprop", {"rho": 0.8}),
    "rmsprop_all": ("RMSprop", {"rho": 0.8, "momentum": 0.5, "centered": True}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.2}),
    "adadelta": ("Adadelta", {"rho": 0.8}),
    "adamax": ("Adamax", {"beta_1": 0.8}),
    "ftrl": ("Ftrl", {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.1}),
}
ONLY_NEW = {
    "adamw": ("AdamW", {"weight_decay": 0.05}),
    "lion": ("Lion", {"beta_1": 0.8}),
    "nadam": ("Nadam", {"beta_1": 0.8}),
    "ema": ("Adam", {"use_ema": True, "ema_momentum": 0.5}),
}

# What a checkpoint of a legacy optimizer holds besides the learning rate.
SAVED_SETTINGS = {
    "momentum",
    "beta_1",
    "beta_2",
    "rho",
    "l1_regularization_strength",
    "l2_regularization_strength",
}


def tf_variables():
    """Two variables of one shape, so that state that changes places is not noticed by shape."""
    first = np.linspace(-1.0, 1.0, 4, dtype="float32").reshape(2, 2)
    return [tf.Variable(first, name="w"), tf.Variable(first.T * 2.0, name="u")]


def gradients(steps, start=0):
    """The gradients of each step, the same for everybody."""
    random = np.random.default_rng(3)
    every = random.normal(size=(start + steps, 2, 2, 2)).astype("float32")
    return every[start:]


def train(optimizer, variables, steps, start=0):
    """Trains with these gradients; whoever scales the loss does it by a power of two."""
    for step in gradients(steps, start):
        optimizer.minimize(loss_of(variables, step), variables)


def loss_of(variables, step):
    return lambda: tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, step, strict=True)])


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(v))) for v in variables]


def number(scalar):
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(scalar)).item()


def held(model):
    """The weights and all of the inner optimizer: with these, two models go on as one."""
    state = model.optimizer.inner_optimizer.variables
    return [*model.get_weights(), *values(state() if callable(state) else state)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(found, expected, rtol=1e-4, atol=1e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def assert_held(model, expected):
    assert_equal(held(model), expected)


def ours(inner, **arguments):
    return lossscale.LossScaleOptimizer(inner, **arguments)


def sequential(module, seed=1):
    """A model with nested layers, and with weights that are not trained."""
    layers = module.layers
    model = module.Sequential(
        [
            layers.Input((3, 2)),
            layers.Bidirectional(layers.LSTM(2)),
            layers.Dense(3, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    random = np.random.default_rng(seed)
    model.set_weights([random.uniform(0.1, 1.0, w.shape) for w in model.get_weights()])
    return model


def dense(module):
    """A model with several weights of one shape, whose gradients are all large."""
    layers = module.layers
    stack = [layers.Input((2,)), *(layers.Dense(2, activation="tanh") for _ in range(2))]
    model = module.Sequential([*stack, layers.Dense(1)])
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(-0.9, 0.9, w.shape) for w in model.get_weights()])
    return model


def data(*shape):
    random = np.random.default_rng(5)
    x = random.normal(size=(8, *shape)).astype("float32")
    return x, 5.0 + random.normal(size=(8, 1)).astype("float32")


def fit(model, steps):
    """Trains on one batch, eagerly: how each of these models is compiled is tested elsewhere."""
    x, y = data(*model.input_shape[1:])
    model.run_eagerly = True
    for _ in range(steps):
        model.train_on_batch(x, y)

"""Models of Keras 3 on every backend, and gradients by the framework itself."""

import keras
import numpy as np

BACKEND = keras.backend.backend()
ops = keras.ops
set_policy = keras.config.set_dtype_policy
layers = keras.layers


def numpy_of(tensor):
    if BACKEND == "torch" and hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
    return np.array(keras.ops.convert_to_numpy(tensor), np.float64)


def wide(tensor):
    return ops.cast(tensor, "float32")


def gradients(model, loss_of, scale=1.0):
    """The gradients of a scaled `loss_of(model)`, as a loop of the user's has them."""
    variables = model.trainable_variables
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = wide(loss_of(model)) * scale
        found = tape.gradient(loss, [v.value for v in variables])
        return [None if g is None else numpy_of(tf.convert_to_tensor(g)) for g in found]
    if BACKEND == "torch":
        for variable in variables:
            variable.value.grad = None
        (wide(loss_of(model)) * scale).backward()
        found = [variable.value.grad for variable in variables]
        for variable in variables:
            variable.value.grad = None
        return [None if g is None else numpy_of(g) for g in found]
    import jax

    def scaled(values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return wide(loss_of(model)) * scale

    return [numpy_of(g) for g in jax.grad(scaled)([v.value for v in variables])]


def error(found, expected, least=0.0):
    """The relative error of an array, whose norm counts as `least` at least."""
    norm = max(np.linalg.norm(expected), least)
    return np.linalg.norm(np.float64(found) - expected) / (norm or 1.0)


def some_data(rows=24, features=6, classes=4):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, features)).astype(np.float32), rng.integers(
        classes, size=rows
    )


def compiled(model, loss="mse", **arguments):
    model.compile("sgd", loss, **arguments)
    return model


def divided(by):
    """A mean square error, divided."""

    def loss(y, y_pred):
        return ops.mean((wide(y_pred) - wide(y)) ** 2, axis=-1) / by

    return loss


# Layers are cast by the same code. These have sparse gradients, loops, statistics, shapes or
# operations of their own.
LAYERS = {
    "Dense": (lambda: layers.Dense(3, activation="tanh"), (6,)),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(3, 3), (4, 4, 2)),
    "Embedding": (lambda: layers.Embedding(50, 3), None),
    "LSTM": (lambda: layers.LSTM(3), (5, 2)),
    "BatchNormalization": (layers.BatchNormalization, (6,)),
    "MaxPooling2D": (layers.MaxPooling2D, (6, 6, 2)),
}
RANDOM_LAYERS = {
    "Dropout": lambda: layers.Dropout(0.5, seed=1),
    "GaussianNoise": lambda: layers.GaussianNoise(0.5, seed=1),
    "recurrent dropout": lambda: layers.LSTM(3, dropout=0.3, recurrent_dropout=0.3, seed=1),
}


def with_layer(make, shape, policy="float32"):
    """A model that has a layer, and data for it."""
    keras.utils.set_random_seed(0)
    set_policy(policy)
    rng = np.random.default_rng(0)
    if shape is None:
        given, x = keras.Input((5,), dtype="int32"), rng.integers(10, size=(16, 5))
    else:
        given, x = keras.Input(shape), rng.standard_normal((16, *shape)).astype(np.float32)
    model = keras.Sequential([given, make(), layers.Flatten(), layers.Dense(1)])
    set_policy("float32")
    return compiled(model, divided(1.0)), x, rng.standard_normal((16, 1)).astype(np.float32)

"""Models with known gradients, for Keras 3 and for tf_keras: each takes the library."""

from types import SimpleNamespace

import numpy as np

LOST = 2.0**-40
"""A loss times this has gradients that float16 takes for zero."""


def library_of_keras():
    import keras

    def mean_square(factor):
        def loss(y, y_pred):
            y, y_pred = (keras.ops.cast(each, "float32") for each in (y, y_pred))
            return keras.ops.mean((y_pred - y) ** 2, axis=-1) * factor

        return loss

    return SimpleNamespace(
        keras=keras,
        layers=keras.layers,
        mean_square=mean_square,
        cast=keras.ops.cast,
        matmul=keras.ops.matmul,
        mean=keras.ops.mean,
        set_policy=keras.config.set_dtype_policy,
        numpy=keras.ops.convert_to_numpy,
    )


def library_of_tf_keras():
    import tensorflow as tf
    import tf_keras

    def mean_square(factor):
        def loss(y, y_pred):
            y, y_pred = (tf.cast(each, "float32") for each in (y, y_pred))
            return tf.reduce_mean((y_pred - y) ** 2, axis=-1) * factor

        return loss

    return SimpleNamespace(
        keras=tf_keras,
        layers=tf_keras.layers,
        mean_square=mean_square,
        cast=tf.cast,
        matmul=tf.matmul,
        mean=tf.reduce_mean,
        set_policy=tf_keras.mixed_precision.set_global_policy,
        numpy=lambda tensor: tensor.numpy(),
    )


def compiled(library, model, factor=1.0, optimizer="sgd"):
    model.compile(optimizer, library.mean_square(factor))
    return model


def repeated_token(library, factor=1.0):
    """A model of tokens, of which nearly all are the same; its data, and its gradient by hand."""
    layers = library.layers
    model = library.keras.Sequential(
        [
            library.keras.Input((8,), dtype="int32"),
            layers.Embedding(5, 3, name="embedding", embeddings_initializer="ones"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, use_bias=False, name="end", kernel_initializer="ones"),
        ]
    )
    x = np.zeros((32, 8), np.int32)
    x[0, 0] = 3
    y = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    error = 3.0 - y
    expected = np.zeros((5, 3))
    for tokens, wrong in zip(x, error[:, 0], strict=True):
        for token in tokens:
            expected[token] += 2 / 32 * wrong / 8 * factor
    return compiled(library, model, factor), x, y, expected


def _hidden(layers, **arguments):
    return layers.Dense(
        4, use_bias=False, name="hidden", kernel_initializer="ones", **arguments
    ), layers.Dense(
        1,
        use_bias=False,
        name="end",
        # The gradient by what `hidden` returns is too small for float16, the one by its kernel is
        # not: it is a sum over large inputs.
        kernel_initializer=lambda shape, dtype=None: np.full(shape, 2.0**-14, "float32"),
    )


def lost_inside(library):
    """A graph: float16 makes the gradient of its first kernel zero, which float32 shows fits."""
    hidden, end = _hidden(library.layers)
    model = library.keras.Sequential([library.keras.Input((3,)), hidden, end], name="net")
    return compiled(library, model, 2.0**-14)


def subclassed_twin(library):
    """The same, as a subclass, with a layer of its own around the first."""

    class Block(library.layers.Layer):
        def __init__(self, hidden):
            super().__init__(name="block")
            self.hidden = hidden

        def build(self, shape):
            self.hidden.build(shape)
            self.built = True

        def call(self, x):
            return self.hidden(x)

    class Net(library.keras.Model):
        def __init__(self):
            super().__init__(name="net")
            hidden, self.end = _hidden(library.layers)
            self.block = Block(hidden)

        def call(self, x):
            return self.end(self.block(x))

    model = Net()
    model(large_inputs()[0][:1])
    return compiled(library, model, 2.0**-14)


def large_inputs():
    """Inputs for the two: the sum over them brings the first kernel's gradient back into range."""
    x = np.random.default_rng(0).uniform(2.0**9, 2.0**10, (32, 3)).astype(np.float32)
    return x, np.full((32, 1), -1.0, np.float32)


def casting_by_itself(library, factor):
    """A layer that computes in float16 whatever its policy is."""

    class Cast(library.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(name="kernel", shape=(3, 4), initializer="ones")

        def call(self, x):
            kernel = library.cast(library.cast(self.kernel, "float32"), "float16")
            return library.cast(library.matmul(library.cast(x, "float16"), kernel), "float32")

    model = library.keras.Sequential(
        [library.keras.Input((3,)), Cast(name="cast"), library.layers.Dense(1, name="end")]
    )
    # Only what happens in the layer is too small: the rest of the model is in float32.
    return compiled(library, model, factor)


def random_everywhere(library, factor=1.0):
    """Dropout and noise, which frameworks draw otherwise in float16 than in float32."""
    layers = library.layers
    model = library.keras.Sequential(
        [
            library.keras.Input((3,)),
            layers.Dense(16, activation="tanh"),
            layers.Dropout(0.5, seed=1),
            layers.GaussianNoise(1.0, seed=2),
            layers.GaussianDropout(0.3, seed=3),
            layers.Dense(1),
        ]
    )
    return compiled(library, model, factor)


def some_inputs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 3)).astype(np.float32)
    return x, x[:, :1] - 1


# --- What is claimed of them ---------------------------------------------------------------------


def variable(report, name):
    """What was measured of one variable."""
    return next(each for each in report.measured_variables if each.name.endswith(name))

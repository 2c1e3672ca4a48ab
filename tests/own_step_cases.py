"""Models with a `train_step` of their own, as users write them, for every backend and tf_keras."""

import os

import numpy as np

import fidelity_cases as cases
import lossscale

TF_KERAS = os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras"


def library():
    """The Keras of this process, and how a step is written with its backend."""
    found = cases.library_of_tf_keras() if TF_KERAS else cases.library_of_keras()
    found.backend = "tensorflow" if TF_KERAS else found.keras.backend.backend()
    found.step = {"tensorflow": _with_a_tape, "torch": _backwards, "jax": _stateless}[found.backend]
    return found


def _with_a_tape(model, data, loss_of, variables, optimizer):
    """How a step is written on TensorFlow, with Keras 3 and with tf_keras."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of(data)
        asked = loss
        if model.scales == "scale_loss":
            asked = optimizer.scale_loss(loss)
        elif model.scales == "get_scaled_loss":
            asked = optimizer.get_scaled_loss(loss)
    if model.scales == "minimize":
        optimizer.minimize(loss, variables, tape=tape)
        return loss
    gradients = tape.gradient(asked, variables)
    if model.scales == "get_scaled_loss":
        gradients = optimizer.get_unscaled_gradients(gradients)
    if model.clips:
        gradients = [tf.clip_by_value(each, -model.clips, model.clips) for each in gradients]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


def _backwards(model, data, loss_of, variables, optimizer):
    """How a step is written on PyTorch."""
    import torch

    model.zero_grad()
    loss = loss_of(data)
    asked = loss
    if model.scales == "scale_loss":
        asked = optimizer.scale_loss(loss)
    elif model.scales == "get_scaled_loss":
        asked = optimizer.get_scaled_loss(loss)
    asked.backward()
    gradients = [variable.value.grad for variable in variables]
    with torch.no_grad():
        if model.scales == "get_scaled_loss":
            gradients = optimizer.get_unscaled_gradients(gradients)
        if model.clips:
            gradients = [torch.clamp(each, -model.clips, model.clips) for each in gradients]
        if model.scales == "get_scaled_loss":
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            optimizer.apply(gradients, variables)
    return loss


def _stateless(model, state, data):
    """How a step is written on JAX."""
    import jax

    values, others, of_optimizer, of_metrics = state

    def loss_of(values, others):
        outputs, others = model.stateless_call(values, others, data[0])
        loss = asked = model.loss_from(outputs, data)
        if model.scales:
            mapping = list(zip(model.optimizer.variables, of_optimizer, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                asked = model.optimizer.scale_loss(loss)
        return asked, (loss, others)

    (_, (loss, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(values, others)
    values, of_optimizer = model.optimizer.stateless_apply(of_optimizer, gradients, values)
    of_metrics = model.tracker.stateless_update_state(of_metrics, loss)
    return {"loss": loss}, (values, others, of_optimizer, of_metrics)


LIBRARY = library()
SCALES = {
    "tensorflow": ("get_scaled_loss", "minimize")
    if TF_KERAS
    else ("scale_loss", "get_scaled_loss"),
    "torch": ("scale_loss", "get_scaled_loss"),
    "jax": ("scale_loss",),
}[LIBRARY.backend]
"""The ways in which a step can scale its loss; with "" it forgets to."""
keras, layers, cast, mean = LIBRARY.keras, LIBRARY.layers, LIBRARY.cast, LIBRARY.mean


class Stepping(keras.Model):
    """What the models share: the step of the backend, and a metric."""

    scales = SCALES[0]
    clips = 0.0

    def __init__(self, factor):
        super().__init__(name=type(self).__name__.lower())
        self.factor = factor
        self.tracker = keras.metrics.Mean(name="tracker")
        self.steps = 0

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, *arguments):
        self.steps += 1
        if LIBRARY.backend == "jax":
            return LIBRARY.step(self, *arguments)
        (data,) = arguments
        for loss_of, variables, optimizer in self.parts():
            loss = LIBRARY.step(self, data, loss_of, variables, optimizer)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def parts(self):
        """The losses of a step, what is trained by each, and with which optimizer."""
        return [(self.own_loss, self.trainable_variables, self.optimizer)]

    def own_loss(self, data):
        return self.loss_from(self(data[0]), data)


def wide(tensor):
    return cast(tensor, "float32")


class Vae(Stepping):
    """An autoencoder that samples: its loss is in its `train_step`, and `compile` has none."""

    def __init__(self, factor):
        super().__init__(factor)
        self.encoder = layers.Dense(4, activation="tanh", name="encoder")
        self.decoder = layers.Dense(3, name="decoder")
        if not TF_KERAS:
            self.seeds = keras.random.SeedGenerator(7)

    def call(self, x):
        code = self.encoder(x)
        middle, spread = code[:, :2], code[:, 2:]
        noise = 0.5
        if not TF_KERAS:
            noise = cast(keras.random.normal(middle.shape, seed=self.seeds), middle.dtype)
        return self.decoder(middle + (1 + spread) * noise), middle, spread

    def loss_from(self, outputs, data):
        decoded, middle, spread = (wide(each) for each in outputs)
        loss = mean((decoded - data[0]) ** 2) + mean(middle**2) + mean(spread**2)
        return loss * self.factor


class Contrastive(Stepping):
    """Two views of a sample, brought together: by a loss that is no function of one call."""

    def __init__(self, factor):
        super().__init__(factor)
        self.tower = layers.Dense(4, name="tower", use_bias=False)

    def call(self, x):
        return self.tower(x)

    def loss_from(self, outputs, data):
        other = wide(self.tower(data[1])) if LIBRARY.backend != "jax" else 1.0
        return mean((wide(outputs) - other) ** 2) * self.factor


def _slope(function, x):
    """The gradient of a function by its input, in a way that can be derived again."""
    if LIBRARY.backend == "torch":
        import torch

        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x).sum(), [x], create_graph=True)[0]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        found = function(x)
    return tape.gradient(found, x)


class Penalized(Contrastive):
    """Takes a gradient by its inputs for the loss, and another one by its variables."""

    def own_loss(self, data):
        slope = wide(_slope(lambda x: wide(self.tower(x)) ** 2, data[0]))
        return mean((slope**2 - 1) ** 2) * self.factor


class Guarded(Contrastive):
    """Scales its loss only if it is given an optimizer for that."""

    @property
    def scales(self):
        scales = isinstance(self.optimizer, lossscale.LossScaleOptimizer)
        return SCALES[0] if scales else ""


class Through(keras.Model):
    """Has the step of Keras, with a layer around it; and all that `compile` can give."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


class Gan(Stepping):
    """Two networks, each with a loss and an optimizer of its own; it cannot be called."""

    def __init__(self, factor):
        super().__init__(factor)
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(3)], name="generator"
        )
        self.discriminator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(1)], name="discriminator"
        )
        if not TF_KERAS:
            self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def parts(self):
        return [
            (self.loss_of_d, self.discriminator.trainable_variables, self.d_optimizer),
            (self.loss_of_g, self.generator.trainable_variables, self.g_optimizer),
        ]

    def loss_of_d(self, data):
        real, latent = data
        of_real, of_fake = (wide(self.discriminator(x)) for x in (real, self.generator(latent)))
        return (mean((of_real - 1) ** 2) + mean(of_fake**2)) * self.factor

    def loss_of_g(self, data):
        return mean((wide(self.discriminator(self.generator(data[1]))) - 1) ** 2) * self.factor


class HalfScaled(Gan):
    """Scales the loss of one network only."""

    def parts(self):
        for scales, part in zip((SCALES[0], ""), super().parts(), strict=True):
            self.scales = scales
            yield part


def compiled(kind, factor):
    """A graph with statistics, random numbers and metrics, as a model of a class."""
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    y = layers.BatchNormalization()(layers.Dense(4, "relu")(x))
    model = kind(x, layers.Dense(1)(layers.Dropout(0.3, seed=1)(y)))
    model.compile("adam", LIBRARY.mean_square(factor), metrics=["mae"])
    return model


def made(kind, factor=1.0, *, policy="float32", optimizer="sgd", scales=SCALES[0], **attributes):
    """A compiled model, and data for it."""
    keras.utils.set_random_seed(0)
    LIBRARY.set_policy(policy)
    model = kind(factor)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((16, 3)).astype(np.float32) for _ in range(2))
    if issubclass(kind, Gan):
        model.compile(*optimizer)
    else:
        model(x[:1])
        model.compile(optimizer)
    LIBRARY.set_policy("float32")
    if scales is not None:
        model.scales = scales
    for name, value in attributes.items():
        setattr(model, name, value)
    return model, x, y

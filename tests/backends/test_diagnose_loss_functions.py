"""Models with a `train_step` of their own: what `diagnose` asks for, and the programs to write."""

import numpy as np
import pytest

import keras_cases as cases
from keras_cases import keras, layers, ops, wide
from lossscale.diagnosis import diagnose
from lossscale.diagnosis.keras import KerasGradientFunction
from lossscale.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def data():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((16, 3)).astype(np.float32) for _ in range(2))


class OwnStep(keras.Model):
    """What the models share: a step that a diagnosis must not run."""

    def train_step(self, *arguments):
        raise AssertionError("A step is not run.")


# --- A generative adversarial network ------------------------------------------------------------


class Gan(OwnStep):
    """Two networks, each with a loss and an optimizer of its own; it cannot be called."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, activation="relu"), layers.Dense(3)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, activation="relu"), layers.Dense(1)]
        )

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer


def losses_of_gan(model, batch):
    real, latent, _ = batch
    fake = model.generator(latent, training=True)
    of_real, of_fake = (wide(model.discriminator(x, training=True)) for x in (real, fake))
    return {
        "d": ops.mean((of_real - 1) ** 2) + ops.mean(of_fake**2),
        "g": ops.mean((of_fake - 1) ** 2) * 2.0**-30,
    }


def new_gan():
    model = Gan()
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    return model


@pytest.mark.parametrize(("name", "verdict"), [("d", "not needed"), ("g", "needed")])
def test_each_of_several_losses_is_judged_by_its_own_variables(name, verdict):
    model, (x, y) = new_gan(), data()
    network = {"d": model.discriminator, "g": model.generator}[name]
    owned = network.trainable_variables

    def loss_fn(model, batch):
        return losses_of_gan(model, batch)[name]

    assert diagnose(model, x, y, loss_fn=loss_fn, parameters=owned).verdict == verdict
    found = KerasGradientFunction(model, loss_fn, owned)((x, y), 1.0, False).gradients
    given = tuple(ops.convert_to_tensor(each) for each in (x, y))
    expected = cases.gradients(model, lambda model: loss_fn(model, (*given, None)))
    order = {id(variable): n for n, variable in enumerate(model.trainable_variables)}
    for gradient, variable in zip(found.values(), owned, strict=True):
        assert cases.error(gradient, expected[order[id(variable)]]) < 1e-5


# --- Without a loss function ---------------------------------------------------------------------


def lines_of(error):
    """The function in a message, as its user pastes it."""
    lines = str(error).splitlines()
    start = next(n for n, line in enumerate(lines) if "def loss_fn" in line)
    found = [line.removeprefix("    ") for line in lines[start : start + 3]]
    assert found[-1].strip().startswith("return")
    return "\n".join(found)


class Own(OwnStep):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, name="dense", use_bias=False)

    def call(self, x, training=None):
        return self.dense(x)


@pytest.mark.parametrize(
    ("loss", "written"),
    [
        (None, "ops.mean((wide(model(x)) - y) ** 2)"),
        ("mse", "model.compute_loss(x, y, model(x, training=True), sample_weight)"),
    ],
)
def test_a_step_of_ones_own_is_refused_with_the_lines_to_write(loss, written):
    model, (x, _) = Own(), data()
    model.compile("sgd", loss)
    model(x)
    y = np.zeros((16, 4), np.float32)
    with pytest.raises(ArgumentError, match="Own has a train_step of its own") as no:
        diagnose(model, x, y)
    names = {"ops": ops, "wide": wide}
    exec(lines_of(no.value).replace("...  #", f"{written}  #"), names)
    assert diagnose(model, x, y, loss_fn=names["loss_fn"]).verdict == "not needed"

"""Small Keras models of the kinds that people train in float16, trained four ways."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import lossscale
from lossscale.diagnosis import diagnose
from tools.calibration import data
from tools.calibration.data import Split
from tools.calibration.outcomes import contradiction

_BATCH, _STEPS, _TEST = 64, 150, 400
_CATEGORIES = "sparse_categorical_crossentropy"


@dataclasses.dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        name: For the table.
        split: Returns the data.
        layers: Returns the layers after the input, made under the dtype policy in force.
        loss: A Keras loss by name, or a function of targets and what is predicted.
        divisor: What the loss is divided by besides.
        rate: Of the optimizer.
        adam: Whether it is Adam; otherwise SGD with momentum.
        steps: How many steps to train.
    """

    name: str
    split: Callable[[], Split]
    layers: Callable[[], list[Any]]
    loss: Any
    divisor: float = 1.0
    rate: float = 0.05
    adam: bool = False
    steps: int = _STEPS

    def optimizer(self) -> Any:
        """Returns an optimizer whose steps do not depend on the divisor."""
        if self.adam:
            return keras.optimizers.Adam(self.rate, epsilon=1e-7 / self.divisor)
        return keras.optimizers.SGD(self.rate * self.divisor, momentum=0.9)

    def divided(self, y: Any, y_pred: Any) -> Any:
        """The loss of a batch."""
        loss = keras.losses.get(self.loss) if isinstance(self.loss, str) else self.loss
        return loss(y, ops.cast(y_pred, "float32")) / self.divisor


class Residual(layers.Layer):
    """A dense layer that is added with a small factor at first."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.dense = layers.Dense(width, activation="relu")
        self.factor = factor

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.gain = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(self.factor), name="gain"
        )

    def call(self, x: Any) -> Any:
        return x + self.gain * self.dense(x)


class Attention(layers.Layer):
    """A block of a transformer: attention and a dense layer, each normalized and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.dense = layers.Dense(width, activation="gelu")

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        for part in (*self.norms, self.dense):
            part.build(shape)

    def call(self, x: Any) -> Any:
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal)
        return x + self.dense(self.norms[1](x))


class Block(layers.Layer):
    """Operations without weights that float16 breaks."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def _rms(x: Any, epsilon: float) -> Any:
    return x * ops.rsqrt(ops.mean(x * x, -1, keepdims=True) + epsilon)


def _attend(x: Any) -> Any:
    """Attention from one unit to another, with a row that is masked as a whole by -1e9."""
    rows = ops.reshape(x, (-1, 4, 16))
    scores = ops.matmul(rows, ops.transpose(rows, (0, 2, 1)))
    scores = ops.where(ops.arange(4)[:, None] == 3, ops.cast(-1e9, x.dtype), scores)
    return x + ops.reshape(ops.matmul(ops.softmax(scores), rows), ops.shape(x))


_BROKEN = {
    "RMS norm of activations x 1000": lambda x: _rms(x * 1000, 1e-5),
    "RMS norm of some zeros, epsilon of 1e-8": lambda x: _rms(x[:, :, None], 1e-8)[..., 0],
    "attention, a row masked by -1e9": _attend,
    "logarithm of probabilities": lambda x: ops.log(ops.softmax(x * 20)),
    "sum of units x 3e4": lambda x: x / (1 + ops.sum(x * 3e4, -1, keepdims=True) / 3e4),
}


def _softmax(classes: int = 10) -> list[Any]:
    # float32, as Keras advises; its gradient enters the float16 part where the logits are.
    return [layers.Dense(classes), layers.Activation("softmax", dtype="float32")]


def _dense() -> list[Any]:
    return [layers.Flatten(), layers.Dense(64, activation="relu"), *_softmax()]


def _deep() -> list[Any]:
    return [layers.Flatten(), *(layers.Dense(48, "tanh") for _ in range(8)), *_softmax()]


def _softmax_in_float16() -> list[Any]:
    return [layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10, "softmax")]


def _convolutions(kind: Callable[..., Any] = layers.Conv2D) -> list[Any]:
    found: list[Any] = [layers.Reshape((8, 8, 1))]
    for filters in (8, 16):
        found += [kind(filters, 3, strides=2), layers.BatchNormalization(), layers.ReLU()]
    return [*found, layers.Flatten(), *_softmax()]


def _recurrent(kind: Callable[..., Any]) -> list[Any]:
    return [kind(16), layers.Dense(1)]


def _transformer() -> list[Any]:
    return [layers.Dense(16), Attention(16, 2), layers.GlobalAveragePooling1D(), *_softmax()]


def _words() -> list[Any]:
    return [layers.Embedding(2000, 16), layers.GlobalAveragePooling1D(), *_softmax()]


def _residual(factor: float) -> list[Any]:
    blocks = [Residual(48, factor) for _ in range(3)]
    return [layers.Flatten(), layers.Dense(48), *blocks, *_softmax()]


def _autoencoder() -> list[Any]:
    outside = [layers.Dense(64), layers.Activation("sigmoid", dtype="float32")]
    return [layers.Flatten(), layers.Dense(16, "relu"), *outside, layers.Reshape((8, 8))]


def _broken(function: Callable[[Any], Any]) -> list[Any]:
    return [layers.Flatten(), layers.Dense(64, activation="relu"), Block(function), *_softmax()]


def _regressor() -> list[Any]:
    return [layers.Dense(32, activation="relu"), layers.Dense(1)]


def _large_inputs() -> list[Any]:
    """Outputs beyond the range of float16, which float32 learns from all the same."""
    wide = layers.Dense(64, kernel_initializer=keras.initializers.RandomUniform(-1, 1, seed=0))
    inside = [layers.LayerNormalization(), layers.ReLU()]
    return [layers.Flatten(), layers.Rescaling(6e4), wide, *inside, *_softmax()]


def _images_as_targets() -> Split:
    x, _, test_x, _ = data.digits()
    return Split(x, x, test_x, test_x)


def _summed(y: Any, y_pred: Any) -> Any:
    return ops.sum((y - y_pred) ** 2)


def _focal(y: Any, y_pred: Any) -> Any:
    chosen = ops.take_along_axis(y_pred, ops.cast(ops.reshape(y, (-1, 1)), "int32"), axis=1)
    return -ops.mean((1 - chosen) ** 2 * ops.log(chosen + 1e-7))


def _digits(
    name: str, made: Any, divisor: float = 1.0, loss: Any = _CATEGORIES, **more: Any
) -> Task:
    return Task(name, data.digits, made, loss, divisor, **more)


def _sums(name: str, kind: Any, divisor: float = 1.0) -> Task:
    return Task(name, data.sums, functools.partial(_recurrent, kind), "mse", divisor, **_LONG)


def _regression(name: str, factor: float, loss: Any = "mse", **more: Any) -> Task:
    return Task(name, functools.partial(data.line, factor), _regressor, loss, **more)


_ADAM: dict[str, Any] = {"rate": 3e-3, "adam": True}
_FASTER = _ADAM | {"rate": 1e-2}
_LONG = _FASTER | {"steps": 60}
_separable = functools.partial(_convolutions, layers.SeparableConv2D)
TASKS = (
    _digits("digits, dense", _dense),
    _digits("digits, dense, loss / 2**12", _dense, 2.0**12),
    _digits("digits, dense, loss / 2**20", _dense, 2.0**20),
    _digits("digits, dense, loss / 2**30, Adam", _dense, 2.0**30, **_ADAM),
    _digits("digits, dense, loss x 2**16", _dense, 2.0**-16),
    _digits("digits, 8 tanh layers", _deep, **_ADAM),
    _digits("digits, 8 tanh layers, loss / 2**14", _deep, 2.0**14, **_ADAM),
    _digits("digits, softmax in float16", _softmax_in_float16),
    _digits("digits, focal loss", _dense, loss=_focal),
    _digits("digits, convolutions", _convolutions, rate=0.01),
    _digits("digits, convolutions, loss / 2**16", _convolutions, 2.0**16, rate=0.01),
    _digits("digits, separable convolutions", _separable, rate=0.01),
    _digits("digits, transformer", _transformer, **_ADAM),
    _digits("digits, transformer, loss / 2**14", _transformer, 2.0**14, **_ADAM),
    _digits("digits, residual gain 1e-4", functools.partial(_residual, 1e-4)),
    Task("digits, autoencoder", _images_as_targets, _autoencoder, "binary_crossentropy", **_ADAM),
    _digits("digits x 60,000", _large_inputs, rate=1e-3, adam=True),
    Task("words, embedding", data.baskets, _words, _CATEGORIES, **_FASTER),
    Task("words, embedding, loss / 2**12", data.baskets, _words, _CATEGORIES, 2.0**12, **_FASTER),
    _sums("sums, GRU", layers.GRU),
    _sums("sums, LSTM, loss / 2**14", layers.LSTM, 2.0**14),
    _regression("regression", 1.0),
    _regression("regression, targets x 100, summed", 100.0, _summed, **_FASTER),
    _regression("regression, targets x 1000", 1e3, rate=0.5, adam=True),
    _regression("regression, targets x 1e5", 1e5, rate=30.0, adam=True),
    _regression("regression, targets x 1e5, absolute", 1e5, "mae", rate=30.0, adam=True),
    *(_digits(name, functools.partial(_broken, block)) for name, block in _BROKEN.items()),
)


def run(task: Task) -> dict[str, Any]:
    """Asks for the verdict, then trains in float32 and in float16.

    Args:
        task: What to train.

    Returns:
        A row of the table: the task, the verdict and the rule, the quality (the loss on data that
        was not trained on, less is better) untrained and by way to train.
    """
    split = task.split()
    model = _model(task, "mixed_float16", task.optimizer())
    report = diagnose(model, split.x, split.y, batch_size=_BATCH)
    row: dict[str, Any] = {
        "task": task.name,
        "verdict": report.verdict.value,
        "rule": report.rule,
        "untrained": _quality(_model(task, "float32", task.optimizer()), task),
        "float32": _train(task, "float32", None),
    }
    # What is unknown may be a model that float16 does not run here.
    rules = {"unscaled": None, "default": lossscale.DynamicScale(), "advised": report.rule}
    for way, rule in rules.items():
        if row["verdict"] != "unknown" and (rule is not None or way == "unscaled"):
            row[way] = _train(task, "mixed_float16", rule)
    row["wrong"] = contradiction(row)
    return row


def _model(task: Task, policy: str, optimizer: Any) -> Any:
    split = task.split()
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        given = keras.Input(split.x.shape[1:], dtype=split.x.dtype.name)
        model = keras.Sequential([given, *task.layers()])
    finally:
        keras.config.set_dtype_policy(before)
    # Else Keras adds loss scaling of its own where there is to be none.
    model.compile(optimizer, task.divided, auto_scale_loss=False)
    return model


def _train(task: Task, policy: str, rule: Any) -> float:
    optimizer: Any = task.optimizer()
    if rule is not None:
        optimizer = lossscale.LossScaleOptimizer(optimizer, rule=rule)
    model = _model(task, policy, optimizer)
    split, random = task.split(), np.random.default_rng(0)
    for _ in range(task.steps):
        rows = random.choice(len(split.x), _BATCH, replace=False)
        model.train_on_batch(split.x[rows], split.y[rows])
    return _quality(model, task)


def _quality(model: Any, task: Task) -> float:
    split = task.split()
    if not all(np.isfinite(weight).all() for weight in model.get_weights()):
        return math.nan
    predicted = model.predict(split.test_x[:_TEST], batch_size=_TEST, verbose=0)
    y, predicted = map(ops.convert_to_tensor, (split.test_y[:_TEST], predicted))
    loss = dataclasses.replace(task, divisor=1.0).divided(y, predicted)
    return float(np.mean(keras.ops.convert_to_numpy(loss)))

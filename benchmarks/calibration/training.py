"""Trains a task four ways, after asking for the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import lossscale
from benchmarks.calibration.tasks import Task
from lossscale.diagnostics import diagnose

DYNAMIC = lossscale.DynamicScale(initial_scale=2.0**24, growth_interval=50)
"""Starts high, as a scale that is too low learns nothing; trainings of some hundred steps are too
short for the usual 2000 steps between rises."""


class Outcome(NamedTuple):
    """What a training ended with.

    Attributes:
        quality: The task's quality on the test data; NaN if the weights are not finite.
        skipped: Steps that were skipped.
    """

    quality: float
    skipped: int


class Row(NamedTuple):
    """A task with one number of outputs.

    Attributes:
        task: The name.
        outputs: Outputs that the loss is averaged over, in all.
        quality: What is measured.
        noise: How much of the quality is luck.
        higher_is_better: Whether more of it is better.
        verdict: The verdict before training.
        scale: The recommended scale; None if there is none.
        untrained: The quality before training.
        outcomes: By way to train.
    """

    task: str
    outputs: int
    quality: str
    noise: float
    higher_is_better: bool
    verdict: str
    scale: float | None
    untrained: float
    outcomes: dict[str, Outcome]


def run(task: Task, outputs: int, steps: int | None = None) -> Row:
    """Asks for the verdict, then trains in float32 and in float16.

    Args:
        task: What to train.
        outputs: One of its divisors.
        steps: Steps to train; those of the task by default.
    """
    split = task.split()
    per_sample = int(np.prod(split.y.shape[1:]))
    model = _model(task, "mixed_float16", outputs, task.optimizer(outputs), own_scaling=False)
    report = diagnose(model, split.x, split.y, batch_size=task.batch)
    scale = report.recommended_scale
    rules: dict[str, Any] = {"without scaling": None, "dynamic scale": DYNAMIC}
    if scale is not None:
        rules["recommended scale"] = lossscale.FixedScale(scale)
    outcomes = {"float32": _train(task, "float32", outputs, None, steps)}
    for name, rule in rules.items():
        outcomes[name] = _train(task, "mixed_float16", outputs, rule, steps)
    return Row(
        task.name,
        task.batch * per_sample * outputs,
        task.quality,
        task.noise,
        task.higher_is_better,
        str(report.verdict),
        scale,
        _quality(model, task, outputs),
        outcomes,
    )


def _model(task: Task, policy: str, outputs: int, optimizer: Any, own_scaling: bool) -> Any:
    split = task.split()
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        given = keras.Input(split.x.shape[1:], dtype=split.x.dtype.name)
        model = keras.Sequential([given, *task.layers(split)])
    finally:
        keras.config.set_dtype_policy(before)
    # Else Keras adds loss scaling of its own where there is to be none.
    model.compile(optimizer, _averaged(task.loss, outputs), auto_scale_loss=own_scaling)
    return model


def _averaged(loss: str, outputs: int) -> Callable[[Any, Any], Any]:
    each = keras.losses.get(loss)

    def averaged(y: Any, y_pred: Any) -> Any:
        return each(y, y_pred) / outputs

    return averaged


def _train(task: Task, policy: str, outputs: int, rule: Any, steps: int | None) -> Outcome:
    optimizer: Any = task.optimizer(outputs)
    if rule is not None:
        optimizer = lossscale.LossScaleOptimizer(optimizer, rule=rule)
    model = _model(task, policy, outputs, optimizer, own_scaling=rule is not None)
    split, random = task.split(), np.random.default_rng(0)
    for _ in range(steps or task.steps):
        rows = random.choice(len(split.x), task.batch, replace=len(split.x) < task.batch)
        model.train_on_batch(split.x[rows], split.y[rows])
    skipped = 0
    if rule is not None:
        skipped = int(keras.ops.convert_to_numpy(optimizer.steps_skipped))
    return Outcome(_quality(model, task, outputs), skipped)


def _quality(model: Any, task: Task, outputs: int) -> float:
    split = task.split()
    if not all(np.isfinite(weight).all() for weight in model.get_weights()):
        return math.nan
    x, y = split.test_x[:20_000], split.test_y[:20_000]
    predicted = model.predict(x, batch_size=task.batch, verbose=0).astype("float32")
    measured = keras.losses.get(task.loss) if task.quality == "bits" else None
    if measured is None:
        measured = keras.metrics.get(task.quality)
        measured.update_state(y, predicted)
        return float(measured.result())
    return float(np.mean(keras.ops.convert_to_numpy(measured(y, predicted)))) / math.log(2)

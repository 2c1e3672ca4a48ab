"""Keras 3: `compile`, `fit` and a training loop."""

from typing import Any, reveal_type

import keras
import numpy as np

import lossscale
from lossscale.callbacks import LossScaleMonitor
from lossscale.diagnosis import diagnose

model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
inner = keras.optimizers.Adam(1e-3)
optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=2.0**10)
reveal_type(optimizer)  # AroundKeras
model.compile(optimizer=optimizer, loss="mse")
reveal_type(lossscale.keras.guard(model, optimizer))  # Sequential
monitor = LossScaleMonitor(every=2)
model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[monitor])
reveal_type(monitor.last_record)  # StepRecord | None
reveal_type(diagnose(model, np.ones((8, 2)), np.ones((8, 1))).rule)  # DynamicScale | None


def report(of: lossscale.LossScaleOptimizer) -> str:
    return f"{float(of.loss_scale)} {int(of.steps_skipped)} {of.rule.init().scale}"


def learning_rate(of: keras.optimizers.Optimizer) -> float:
    return float(of.learning_rate)


print(report(optimizer), learning_rate(optimizer))
reveal_type(optimizer.dynamic)  # bool
reveal_type(optimizer.initial_scale)  # float
reveal_type(optimizer.dynamic_growth_steps)  # int | None
reveal_type(optimizer.get_config())  # dict[str, Any]


class Counting(lossscale.keras.LossScaleOptimizer):
    calls = 0

    def get_unscaled_gradients(self, grads: Any) -> list[Any]:
        self.calls += 1
        return super().get_unscaled_gradients(grads)


counting = Counting(keras.optimizers.SGD(0.1), rule=lossscale.DynamicScale(growth_interval=100))
reveal_type(counting.calls)  # int
reveal_type(counting.rule)  # ScaleRule

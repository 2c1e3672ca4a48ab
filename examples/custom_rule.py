"""A custom rule with its own state: lower the scale only after two overflows in a row."""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np

import lossscale


class PatientState(NamedTuple):
    scale: Any
    good_steps: Any
    bad_steps: Any


@dataclasses.dataclass(frozen=True)
class PatientScale(lossscale.ScaleRule):
    """Doubles after `growth_interval` finite steps, halves after `patience` overflows in a row."""

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    patience: int = 2

    @property
    def powers_of_two(self):
        return True

    def init(self):
        return PatientState(self.initial_scale, 0, 0)

    def update(self, state, finite, *, xp):
        good = xp.where(finite, state.good_steps + 1, 0)
        bad = xp.where(finite, 0, state.bad_steps + 1)
        grown = xp.where(state.scale < 2.0**126, state.scale * 2.0, state.scale)
        lowered = xp.where(state.scale > 1.0, state.scale * 0.5, state.scale)
        scale = xp.where(good >= self.growth_interval, grown, state.scale)
        scale = xp.where(bad >= self.patience, lowered, scale)
        return PatientState(
            scale,
            xp.where(good < self.growth_interval, good, 0),
            xp.where(bad < self.patience, bad, 0),
        )

    def get_config(self):
        return dataclasses.asdict(self)


optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1), rule=PatientScale())
weight = keras.Variable([1.0, 2.0])
for gradient in (1.0, np.inf, 1.0, np.nan, np.inf):
    loss_scale = keras.ops.convert_to_numpy(optimizer.scale_loss(1.0))
    scaled_gradient = keras.ops.convert_to_tensor([loss_scale * np.float32(gradient)] * 2)
    optimizer.apply([scaled_gradient], [weight])
    print(f"gradient {gradient}: skipped {int(optimizer.steps_skipped)},", end=" ")
    print(f"scale {float(optimizer.loss_scale):.0f}")

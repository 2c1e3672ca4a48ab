"""The step counter of the documents, kept beside the inner optimizer's own.

The documents count every call of `apply_gradients`, also one whose step was skipped. The inner
optimizer must not: Adam's bias correction and learning rate schedules follow its counter, and
would run ahead of the updates (Adam's first step after ten skipped ones would be 0.48 of its
size). So there are two counters, `inner.iterations` (applied steps) and this one (all steps),
and their difference is the number of skipped steps.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class StepCounter(keras.Variable):
    """Counts applied and skipped steps; assigning to it moves the inner optimizer's counter.

    Args:
        inner_optimizer: The optimizer whose counter is followed.
        steps_skipped: Integer scalar variable, in steps.
    """

    def __init__(self, inner_optimizer: Any, steps_skipped: Any) -> None:
        super().__init__(
            initializer=np.zeros,
            shape=(),
            dtype="int",
            trainable=False,
            aggregation="only_first_replica",
            name="iteration",
        )
        self._applied = inner_optimizer._iterations
        self._skipped = steps_skipped

    def assign(self, value: Any) -> Any:
        """Sets the number of steps; the inner optimizer's counter becomes it less the skips.

        A number below that of the skips lowers that too: no optimizer works with a negative
        counter (Adam's bias correction becomes NaN).
        """
        value = super().assign(value)
        skipped = keras.ops.minimum(self._skipped, value)
        self._skipped.assign(skipped)
        self._applied.assign(value - skipped)
        return value

    def follow(self) -> None:
        """Sets the number of steps from the inner optimizer's counter and the skips."""
        super().assign(self._applied + self._skipped)

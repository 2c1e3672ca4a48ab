"""The weights that the runs without Keras start from, and the share of gradients they lose."""

from __future__ import annotations

import math
from typing import Any

from lossscale.demo.experiment import HIDDEN_UNITS
from lossscale.diagnosis.measurement import share_zeroed

SIZES = ((64, HIDDEN_UNITS), (HIDDEN_UNITS, 10))
"""Inputs and outputs of the two dense layers."""


def first_weights(seed: int) -> list[Any]:
    """Returns a matrix and a bias for each layer, float32 arrays, as Keras would draw them.

    Args:
        seed: Seed of the matrices.

    Source: X. Glorot and Y. Bengio, Understanding the difficulty of training deep feedforward
    neural networks, 2010.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    weights: list[Any] = []
    for inputs, outputs in SIZES:
        limit = math.sqrt(6 / (inputs + outputs))
        matrix = random.uniform(-limit, limit, (inputs, outputs))
        weights += [matrix.astype(np.float32), np.zeros(outputs, np.float32)]
    return weights


class NativeProbe:
    """Computes gradients of one batch.

    Args:
        digits_gradients: Takes a policy, weights and a scale and returns the gradient of each
            weight, arrays.
    """

    def __init__(self, digits_gradients: Any) -> None:
        self._gradients = digits_gradients

    def gradients(self, policy: str, weights: Any, scale: float = 1.0) -> Any:
        """Returns every gradient of the weights, a float32 array of shape (number of weights,)."""
        import numpy as np

        found = self._gradients(policy, weights, scale)
        return np.concatenate([np.asarray(gradient).ravel() for gradient in found])

    def share_flushed(self, policy: str, weights: Any, scale: float) -> float:
        """Returns the share of the gradients that the policy turns into zero, from 0 to 1."""
        return share_zeroed(
            self.gradients("float32", weights), self.gradients(policy, weights, scale)
        )

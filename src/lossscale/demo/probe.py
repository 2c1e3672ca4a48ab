"""Reads the gradients of a Keras model, on every backend by the same means.

The backends compute gradients in three ways that have nothing in common. What they share is that
`train_on_batch` hands the gradients to an optimizer: here one that keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lossscale.diagnosis.measurement import share_zeroed


def gradient_recorder() -> Any:
    """Returns a Keras optimizer that keeps the gradients and leaves the weights alone.

    After a step its attribute `gradients` has a float32 variable for each trainable weight.
    """
    import keras

    class GradientRecorder(keras.optimizers.Optimizer):
        def build(self, variables: Sequence[Any]) -> None:
            super().build(variables)
            self.gradients = [
                self.add_variable_from_reference(variable, name="gradient")
                for variable in variables
            ]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign(self.gradients[self._get_variable_index(variable)], gradient)

    return GradientRecorder(learning_rate=1.0)


class GradientProbe:
    """Computes the gradients of one batch, in float32 and in a policy, for any weights.

    Args:
        build_model: Takes a Keras dtype policy and returns a model that is not compiled.
        loss: The loss, called as Keras calls it.
        images: The batch, an array.
        labels: What its images show, an array.
    """

    def __init__(
        self,
        build_model: Callable[[str], Any],
        loss: Callable[[Any, Any], Any],
        images: Any,
        labels: Any,
    ) -> None:
        self._build_model = build_model
        self._loss = loss
        self._batch = images, labels
        self._models: dict[str, Any] = {}

    def gradients(self, policy: str, weights: Sequence[Any], scale: float = 1.0) -> Any:
        """Returns every gradient of the trainable weights, one after another.

        Args:
            policy: The Keras dtype policy to compute in.
            weights: The weights, as `model.get_weights()` returns them.
            scale: What the loss is multiplied by, in float32.

        Returns:
            A float32 array of shape (number of weights,), still scaled.
        """
        import keras
        import numpy as np

        model = self._models.get(policy)
        if model is None:
            model = self._models[policy] = self._build_model(policy)
            model.compile(gradient_recorder(), self._loss, auto_scale_loss=False)
        model.set_weights(weights)
        images, labels = self._batch
        # A weight of each image, and not a factor of the loss: a new one needs no new tracing.
        model.train_on_batch(images, labels, np.full(len(images), scale, np.float32))
        return np.concatenate(
            [keras.ops.convert_to_numpy(g).ravel() for g in model.optimizer.gradients]
        )

    def share_flushed(self, policy: str, weights: Sequence[Any], scale: float) -> float:
        """Measures the share of gradients that the policy turns into zero.

        An element counts if its gradient is not zero in float32. It is flushed if it is zero
        when the same gradient is computed in the policy, from the same weights and images and
        with the loss multiplied by the scale. So it also counts when not the gradient itself
        was too small for float16, but one that it is computed from.

        Args:
            policy: The Keras dtype policy to compute in.
            weights: The weights, as `model.get_weights()` returns them.
            scale: The loss scale, dimensionless.

        Returns:
            The share, from 0 to 1.
        """
        return share_zeroed(
            self.gradients("float32", weights), self.gradients(policy, weights, scale)
        )

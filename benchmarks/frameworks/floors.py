"""The floors of whole training steps, for every backend of Keras 3."""

from __future__ import annotations

from typing import Any

from keras import ops

from benchmarks.methods import Method


def with_floors(optimizer: Any, method: Method, scale: float) -> Any:
    """Makes an inner optimizer do what a method does before it; returns it.

    Args:
        optimizer: An optimizer of Keras 3.
        method: The method that it is for; unless that is a floor, nothing is changed.
        scale: What the loss is multiplied by, if the method unscales.
    """
    if not (method.reads or method.unscales):
        return optimizer
    inner = type(optimizer)

    class Floor(inner):  # type: ignore[misc, valid-type]
        def scale_loss(self, loss: Any) -> Any:
            return loss * ops.cast(self._scale, loss.dtype) if method.unscales else loss

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if method.reads:
                self._total.assign(sum(ops.sum(gradient) for gradient in grads))
            if method.unscales:
                reciprocal = 1.0 / ops.convert_to_tensor(self._scale)
                grads = [gradient * reciprocal for gradient in grads]
            super().apply(grads, trainable_variables)

    # Variables, so that no compiler knows the scale, and that the sum is not left out.
    optimizer._scale = optimizer.add_variable((), initializer="ones", name="floor_scale")
    optimizer._scale.assign(scale)
    optimizer._total = optimizer.add_variable((), name="floor_total")
    optimizer.__class__ = Floor
    return optimizer

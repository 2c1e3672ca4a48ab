"""Gradients of a loss, counted in a `tf.function`: for both generations of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lossscale.diagnostics.measurement import Counted
from lossscale.diagnostics.tapping import Tap
from lossscale.frameworks.tensorflow import exponents as histograms


def counter(
    loss_of: Callable[[Sequence[Any], Any, Tap], Any],
    values: Callable[[], Sequence[Any]],
    *,
    autograph: bool,
) -> Callable[[Any], list[Counted]]:
    """Returns what takes a batch and counts the gradients of the loss on it.

    In a `tf.function` nothing is drawn from the random seed of eager mode.

    Args:
        loss_of: Given the values, a batch and a tap, returns the loss.
        values: Returns what to derive by, tensors or variables; called in the function.
        autograph: Whether the control flow of the model's layers has to be translated.
    """
    described: list[tuple[int | str, str]] = []

    @tf.function(autograph=autograph)  # type: ignore[untyped-decorator]
    def compute(batch: Any) -> list[Any]:
        watched = list(values())
        tapped: list[tuple[str, Any]] = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)

            def tap(name: str, tensor: Any) -> Any:
                own = tf.identity(tensor)
                tape.watch(own)
                tapped.append((name, own))
                return own

            loss = loss_of(watched, batch, tap)
        sources: list[tuple[int | str, Any]] = [*enumerate(watched), *tapped]
        described[:] = [(key, tensor.dtype.name) for key, tensor in sources]
        gradients = tape.gradient(loss, [tensor for _, tensor in sources])
        return [None if g is None else histograms.count_bins(g) for g in gradients]

    def count(batch: Any) -> list[Counted]:
        tensors = tf.nest.map_structure(_to_tensor, tuple(batch))
        # A concrete function, because TensorFlow warns of functions that are traced each time: it
        # tells them apart by their names, and would take the models of several reports for one.
        found = compute.get_concrete_function(tensors)(tensors)
        return [
            Counted(*each, None if table is None else histograms.on_host(table))
            for each, table in zip(described, found, strict=True)
        ]

    return count


def _to_tensor(array: Any) -> Any:
    return None if array is None else tf.convert_to_tensor(array)

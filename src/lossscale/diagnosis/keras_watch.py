"""Why a pass of a Keras 3 model is not finite, by the watcher of each backend."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from lossscale.common.monkeypatch import replace
from lossscale.monitoring.explanation import Explanation
from lossscale.monitoring.origins import explain_pass


class Explainer:
    """Explains the passes of a model on a batch.

    Args:
        model: The model.
        forward: Returns the loss, float32, for the values of all variables and a batch.
        batch: The structure (x, y, sample_weight) of arrays or None.
        paths: The path of each variable.
        trained: The number of those that are trained, which come first.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[[Any, Any], Any],
        batch: Any,
        paths: Sequence[str],
        trained: int,
    ) -> None:
        self._model, self._forward, self._trained = model, forward, trained
        self._batch = keras.tree.map_structure(
            lambda each: None if each is None else keras.ops.convert_to_tensor(each), batch
        )
        inputs = [
            (f"{name}/{number}" if number else name, each)
            for name, part in zip(("x", "y", "sample_weight"), self._batch, strict=True)
            for number, each in enumerate(keras.tree.flatten(part))
            if each is not None
        ]
        self._arrays = [each for _, each in inputs]
        weights = [(self._inside(path), True) for path in paths]
        self._names = [*weights, *((name, False) for name, _ in inputs)]
        # A layer without weights has no path.
        self._paths = {str(each.path or each.name) for each in model._flatten_layers()}
        self._epsilons: dict[str, float] = {}

    def _inside(self, path: str) -> str:
        return path.removeprefix(f"{self._model.name}/")

    def _layer(self, path: str) -> str:
        """The path of a layer in the model, for that of an operation."""
        found = ""
        for part in path.split("/"):
            # TensorFlow numbers scopes that are entered again.
            for name in (part, re.sub(r"_\d+$", "", part)):
                # A layer that was called before its model has no path in it.
                inner = [each for each in (f"{found}/{name}", name) if each in self._paths]
                if inner:
                    found = inner[0]
                    break
        return self._inside(found) if found else path

    def note_small_numbers(self, values: Sequence[Any]) -> None:
        """Notes the numbers that are added, and that float16 rounds to few digits or to 0.

        Args:
            values: The values of all variables. The model computes in float32.
        """
        backend = keras.backend.backend()
        if backend == "jax":
            import jax

            from lossscale.diagnosis.jaxpr_watch import small_numbers as of_jaxpr

            traced = jax.make_jaxpr(self._forward)(list(values), self._batch)
            self._epsilons = dict(of_jaxpr(traced.jaxpr, self._layer))
        elif backend == "tensorflow":
            from lossscale.diagnosis.graph_watch import small_numbers as of_graph

            def forward(_: Any) -> Any:
                return self._forward(values, self._batch)

            self._epsilons = dict(of_graph(forward, self._layer))

    def explain(self, values: Sequence[Any], scale: float, in_float32: Any) -> Explanation:
        """Explains a pass.

        Args:
            values: The values of all variables.
            scale: The loss scale.
            in_float32: Explains the same pass in float32.
        """
        backend = keras.backend.backend()
        if backend == "torch":
            return self._on_torch(values, scale, in_float32)
        watch = self._on_jax(values) if backend == "jax" else self._on_tensorflow(values)
        return explain_pass(watch, scale, in_float32)

    def _on_jax(self, values: Sequence[Any]) -> Callable[[float], Any]:
        import jax
        import jax.numpy as jnp

        from lossscale.diagnosis.jaxpr_watch import JaxprWatch

        structure = jax.tree.structure(self._batch)

        def compute(values: Any, arrays: Any, scale: Any) -> Any:
            def loss_of(first: Any) -> Any:
                return self._forward([*first, *rest], jax.tree.unflatten(structure, arrays))

            rest = values[self._trained :]
            loss, pull = jax.vjp(loss_of, list(values[: self._trained]))
            return loss, pull(jnp.float32(scale))[0]

        closed = jax.make_jaxpr(compute)(list(values), self._arrays, 1.0)
        watch = JaxprWatch(closed, [*self._names, ("scale", False)], self._epsilons, self._layer)
        return lambda scale: watch([*values, *self._arrays, np.float32(scale)])

    def _on_tensorflow(self, values: Sequence[Any]) -> Callable[[float], Any]:
        import tensorflow as tf

        from lossscale.diagnosis.graph_watch import GraphWatch

        values = list(map(tf.identity, values))

        def compute(scale: Any) -> Any:
            trained = values[: self._trained]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trained)
                loss = self._forward(values, self._batch)
            gradients = tape.gradient(loss, trained, output_gradients=scale)
            rows = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            return loss, *(each for each in rows if each is not None)

        names = dict(zip(map(id, [*values, *self._arrays]), self._names, strict=True))
        return GraphWatch(compute, names, self._epsilons, self._layer)

    def _on_torch(self, values: Sequence[Any], scale: float, in_float32: Any) -> Explanation:
        import torch

        from lossscale.torch.repeated_step import examined
        from lossscale.torch.watch import Watch

        named = list(zip(self._names, [*values, *self._arrays], strict=True))
        watch = Watch(self._model, {name: value for (name, kind), value in named if kind})
        call = keras.Layer.__call__

        def inside(layer: Any, *args: Any, **kwargs: Any) -> Any:
            with watch.inside(self._inside(str(layer.path or layer.name))):
                return call(layer, *args, **kwargs)

        for (name, is_weight), value in named:
            watch.mark(value, name, is_weight=is_weight)
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            replace(stack, keras.Layer, "__call__", inside)
            first = [value.detach().requires_grad_() for value in values[: self._trained]]
            with watch.forward():
                loss = self._forward([*first, *values[self._trained :]], self._batch)
            seeds = [torch.full_like(loss, scale)]
            return examined(watch, [loss], first, seeds, scale, in_float32=in_float32)

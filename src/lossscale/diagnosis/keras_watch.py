"""Why a pass of a Keras 3 model is not finite, by the watcher of each backend."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from lossscale.common.monkeypatch import replace
from lossscale.monitoring.explanation import Explanation, Origin
from lossscale.monitoring.origins import explain_pass


class Explainer:
    """Explains the passes of a model on a batch.

    Args:
        model: The model.
        forward: Returns the loss, float32, for the values of all variables and a batch.
        batch: The structure (x, y, sample_weight) of arrays or None.
        names: The path of each variable.
    """

    def __init__(
        self, model: Any, forward: Callable[[Any, Any], Any], batch: Any, names: Sequence[str]
    ) -> None:
        self._model, self._forward = model, forward
        self._batch = keras.tree.map_structure(
            lambda each: None if each is None else keras.ops.convert_to_tensor(each), batch
        )
        self._inputs = [
            (f"{name}/{number}" if number else name, each)
            for name, part in zip(("x", "y", "sample_weight"), self._batch, strict=True)
            for number, each in enumerate(keras.tree.flatten(part))
            if each is not None
        ]
        self._names = [self._inside(name) for name in names]
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
        """Notes the numbers that a pass adds, and that float16 rounds to few digits or to 0.

        Args:
            values: The values of all variables. The model computes in float32.
        """
        backend = keras.backend.backend()
        if backend == "jax":
            import jax

            from lossscale.diagnosis.jaxpr_watch import small_numbers as of_jaxpr

            traced = jax.make_jaxpr(self._forward)(list(values), self._batch)
            self._epsilons = dict(of_jaxpr(traced.jaxpr))
        elif backend == "tensorflow":
            from lossscale.diagnosis.graph_watch import small_numbers as of_graph

            def forward(_: Any) -> Any:
                return self._forward(values, self._batch)

            self._epsilons = dict(of_graph(forward, self._layer))

    def explain(
        self, values: Sequence[Any], trained: int, scale: float, in_float32: Any
    ) -> Explanation:
        """Explains a pass.

        Args:
            values: The values of all variables.
            trained: The number of those that are trained, which come first.
            scale: The loss scale.
            in_float32: Explains the same pass in float32.
        """
        on_backend = {
            "jax": self._on_jax,
            "tensorflow": self._on_tensorflow,
            "torch": self._on_torch,
        }
        return on_backend[keras.backend.backend()](values, trained, scale, in_float32)

    def _on_jax(
        self, values: Sequence[Any], trained: int, scale: float, in_float32: Any
    ) -> Explanation:
        import jax
        import jax.numpy as jnp

        from lossscale.diagnosis.jaxpr_watch import JaxprWatch

        leaves, structure = jax.tree.flatten(self._batch)

        def compute(values: Any, leaves: Any, scale: Any) -> Any:
            def loss_of(first: Any) -> Any:
                return self._forward([*first, *rest], jax.tree.unflatten(structure, leaves))

            rest = values[trained:]
            loss, pull = jax.vjp(loss_of, list(values[:trained]))
            return loss, pull(jnp.float32(scale))[0]

        closed = jax.make_jaxpr(compute)(list(values), leaves, 1.0)
        names = [*((n, True) for n in self._names), *((n, False) for n, _ in self._inputs)]
        watch = JaxprWatch(closed, [*names, ("scale", False)], self._epsilons, self._layer)
        given = [*values, *leaves]
        return explain_pass(lambda scale: watch([*given, np.float32(scale)]), scale, in_float32)

    def _on_tensorflow(
        self, values: Sequence[Any], trained: int, scale: float, in_float32: Any
    ) -> Explanation:
        import tensorflow as tf

        from lossscale.diagnosis.graph_watch import GraphWatch

        values = list(map(tf.identity, values))

        def compute(scale: Any) -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values[:trained])
                loss = self._forward(values, self._batch)
            gradients = tape.gradient(loss, values[:trained], output_gradients=scale)
            rows = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            return loss, *(each for each in rows if each is not None)

        origins = {
            id(value): Origin(name=name, is_weight=True)
            for name, value in zip(self._names, values, strict=True)
        }
        for name, each in self._inputs:
            array = keras.ops.convert_to_numpy(each)
            is_mask = bool(((array == 0) | (array == -np.inf)).all())
            origins[id(each)] = Origin(name=name, is_mask=is_mask)
        watch = GraphWatch(compute, origins, self._epsilons, self._layer)
        return explain_pass(watch, scale, in_float32)

    def _on_torch(
        self, values: Sequence[Any], trained: int, scale: float, in_float32: Any
    ) -> Explanation:
        import torch

        from lossscale.torch.repeated_step import examined
        from lossscale.torch.watch import Watch

        names = dict(zip(self._names, values, strict=True))
        watch, call = Watch(self._model, names), keras.Layer.__call__

        def named(layer: Any, *args: Any, **kwargs: Any) -> Any:
            with watch.inside(self._inside(str(layer.path or layer.name))):
                return call(layer, *args, **kwargs)

        for name, value in names.items():
            watch.mark(value, name, is_weight=True)
        for name, each in self._inputs:
            watch.mark(each, name)
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            replace(stack, keras.Layer, "__call__", named)
            first = [value.detach().requires_grad_() for value in values[:trained]]
            with watch.forward():
                loss = self._forward([*first, *values[trained:]], self._batch)
            seeds = [torch.full_like(loss, scale)]
            return examined(watch, [loss], first, seeds, scale, in_float32=in_float32)

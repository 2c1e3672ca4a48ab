"""Keras 3 on JAX: one function that `jax.jit` compiles, with its state donated as `fit` does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from benchmarks import models
from benchmarks.frameworks.floors import with_floors
from benchmarks.methods import Method
from benchmarks.workloads import Workload

PACKAGE = keras
MEMORY = "the compiler's plan: temporary buffers, and outputs that replace no input"
GRAPH = "instructions of the HLO program before it is optimized"


def versions() -> dict[str, str]:
    """The versions of what is measured."""
    return {"keras": keras.__version__, "jax": jax.__version__, "jaxlib": jax.lib.__version__}


def devices() -> dict[str, str]:
    """The kinds of device there are, with the GPU's name."""
    gpus = [device.device_kind for device in jax.devices() if device.platform == "gpu"]
    return {"cpu": "", "gpu": gpus[0]} if gpus else {"cpu": ""}


def on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """Within it arrays are made on a device of this kind."""
    return jax.default_device(jax.devices(device)[0])


def forget() -> None:
    """Lets go of the compiled functions of programs that are gone."""
    jax.clear_caches()


def optimizers(shell: str) -> Any:
    """The module of the inner optimizers."""
    return keras.optimizers


class _Compiled:
    """A pure function of a state, compiled once, and the state."""

    fresh_each_step = False

    def __init__(self, function: Callable[..., Any], state: Any, *inputs: Any) -> None:
        self.traces = 0

        def counted(state: Any, *inputs: Any) -> Any:
            self.traces += 1
            return function(state, *inputs)

        self._function = jax.jit(counted, donate_argnums=0)
        self._state, self._inputs, self._outputs = state, inputs, None

    def prepare(self) -> None:
        """The inputs do not change."""

    def step(self) -> None:
        self._state, self._outputs = self._function(self._state, *self._inputs)

    def wait(self) -> None:
        jax.block_until_ready((self._state, self._outputs))

    def structure(self) -> dict[str, int]:
        # Both are found in JAX's caches: nothing is traced or compiled again.
        lowered = self._function.lower(self._state, *self._inputs)
        memory = lowered.compile().memory_analysis()
        new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {
            "graph_size": len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", lowered.as_text("hlo"), re.M)),
            "memory_bytes": memory.temp_size_in_bytes + new_outputs,
        }


class Apply(_Compiled):
    """`stateless_apply` on gradients that were computed before."""

    def __init__(
        self,
        method: Method,
        workload: Workload,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
    ) -> None:
        variables = [keras.Variable(value) for value in workload.values()]
        self.optimizer = method.optimizer(new_inner, scale, keras)
        self.optimizer.build(variables)
        self.optimizer.scale_loss(1.0)
        optimizer_state = [jnp.array(v.value) for v in self.optimizer.variables]
        values = [jnp.array(v.value) for v in variables]
        factor = np.float32(scale if method.scaled else 1)
        gradients = [jnp.asarray(g * factor) for g in workload.gradients()]
        super().__init__(
            lambda state, gradients: _applied(method, self.optimizer, state, gradients),
            (values, optimizer_state, jnp.float32(scale)),
            gradients,
        )

    def parameters(self) -> list[Any]:
        return [np.array(value) for value in self._state[0]]


def _applied(method: Method, optimizer: Any, state: Any, gradients: Any) -> Any:
    values, optimizer_state, scale = state
    total = None
    if method.reads:
        total = sum(jnp.sum(gradient) for gradient in gradients)
    if method.unscales:
        reciprocal = 1.0 / scale
        gradients = [gradient * reciprocal for gradient in gradients]
    values, optimizer_state = optimizer.stateless_apply(optimizer_state, gradients, values)
    return (values, optimizer_state, scale), total


class Train(_Compiled):
    """The train step of Keras' trainer."""

    def __init__(
        self,
        method: Method,
        model_name: str,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
        small: bool,
    ) -> None:
        model = models.new_model(model_name, keras, small)
        optimizer = with_floors(method.optimizer(new_inner, scale, keras), method, scale)
        models.compile_without_scaling(model, keras, optimizer)
        inputs, labels = models.batch(model_name, small)

        def step(state: Any, data: Any) -> Any:
            logs, state = model.train_step(state, data)
            return state, logs

        data = (jnp.asarray(inputs), jnp.asarray(labels))
        model._symbolic_build(data_batch=data)
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            model.metrics_variables,
        )
        state = tuple([jnp.array(v.value) for v in group] for group in groups)
        super().__init__(step, state, data)
        self.first_parameters = self.parameters()

    def parameters(self) -> list[Any]:
        return [np.array(value) for value in self._state[0]]

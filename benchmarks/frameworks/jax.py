"""Keras 3 on JAX: one function that `jax.jit` compiles, with its state donated as `fit` does.

Nothing is imported here that a process without Keras would not need.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import models
from benchmarks.frameworks import Framework
from benchmarks.rows import Row
from benchmarks.timing import Program


class Compiled(Program):
    """A pure function of a state, which `jax.jit` compiles in the first step.

    Args:
        function: Takes the state and the inputs; returns the next state and what the host reads.
        state: The first state, which is donated; its first part is what is trained.
        given: The gradients or the batch.
        jit: Whether it is compiled; else it runs operation by operation.
    """

    def __init__(
        self, function: Callable[[Any, Any], Any], state: Any, given: Any, jit: bool = True
    ) -> None:
        def counted(state: Any, given: Any) -> Any:
            self.traces += 1
            return function(state, given)

        self._run: Any = jax.jit(counted, donate_argnums=0) if jit else function
        self.function, self.state, self.given, self._read = function, state, given, None

    def step(self) -> None:
        self.state, self._read = self._run(self.state, self.given)

    def wait(self) -> None:
        jax.block_until_ready((self.state, self._read))

    def parameters(self) -> list[Any]:
        return [np.array(value) for value in jax.tree.leaves(self.state[0])]

    def structure(self) -> dict[str, Any]:
        """The instructions before they are optimized, and the memory that the compiler plans.

        That is temporary buffers, and outputs that replace no input.
        """
        # Both are found in JAX's caches: nothing is traced or compiled again.
        lowered = self._run.lower(self.state, self.given)
        memory = lowered.compile().memory_analysis()
        new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {
            "graph_size": len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", lowered.as_text("hlo"), re.M)),
            "memory_bytes": memory.temp_size_in_bytes + new_outputs,
        }


def _copies(variables: list[Any]) -> list[Any]:
    return [jnp.array(variable.value) for variable in variables]


def _alone(row: Row, name: str) -> Compiled:
    """`stateless_apply` on gradients that were computed before."""
    optimizer, variables = models.alone(row, name)

    def step(state: Any, gradients: Any) -> Any:
        values, optimizer_state = state
        return optimizer.stateless_apply(optimizer_state, gradients, values), None

    gradients = [jnp.asarray(gradient) for gradient in models.gradients(row, name)]
    return Compiled(step, (_copies(variables), _copies(optimizer.variables)), gradients)


def _training(row: Row, name: str, small: bool) -> Compiled:
    """The train step of Keras' trainer."""
    optimizer, model, batch = models.training(row, name, small)

    def step(state: Any, data: Any) -> Any:
        logs, state = model.train_step(state, data)
        return state, logs

    data = tuple(jnp.asarray(array) for array in batch)
    model._symbolic_build(data_batch=data)
    trained, others = model.trainable_variables, model.non_trainable_variables
    groups = trained, others, optimizer.variables, model.metrics_variables
    return Compiled(step, tuple(_copies(group) for group in groups), data)


def _program(row: Row, name: str, small: bool) -> Program:
    if row.case == "monitor":
        return models.Epoch(row, name, small)
    return _training(row, name, small) if row.model else _alone(row, name)


def _devices() -> dict[str, str]:
    gpus = [device.device_kind for device in jax.devices() if device.platform == "gpu"]
    return {"cpu": "", "gpu": gpus[0]} if gpus else {"cpu": ""}


FRAMEWORK = Framework(
    _program,
    devices=_devices,
    on_device=lambda kind: jax.default_device(jax.devices(kind)[0]),
    forget=jax.clear_caches,
)

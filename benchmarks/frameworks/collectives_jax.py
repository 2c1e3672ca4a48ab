"""The sums over devices in a compiled training step, Keras 3 on JAX with the batch divided."""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.methods import METHODS, SCALE
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.workloads import Workload

_EXAMPLES = 8
_SUM = re.compile(r"= (\(.*?\)|\S+) all-reduce(?:-start)?\(")
_ARRAY = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")


def measure(name: str, workload: Workload, devices: int) -> dict[str, int]:
    """Returns how many sums over the devices a step does, and of how many bytes.

    The loss is linear in the variables, so that each gradient is a mean over the examples of the
    batch; those are divided among the devices, and all else is on each of them.
    """
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec("batch"))
    variables = [keras.Variable(value) for value in workload.values()]
    optimizer = METHODS[name].optimizer(
        lambda **settings: OPTIMIZERS["Adam"](keras.optimizers, **settings), SCALE, keras
    )
    optimizer.build(variables)

    def scaled_loss(values: Any, state: Any, examples: Any) -> Any:
        loss = sum(
            jax.numpy.mean(example @ value) for value, example in zip(values, examples, strict=True)
        )
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(loss)

    def step(values: Any, state: Any, examples: Any) -> Any:
        gradients = jax.grad(scaled_loss)(values, state, examples)
        return optimizer.stateless_apply(state, gradients, values)

    values = [jax.device_put(v.value, everywhere) for v in variables]
    state = [jax.device_put(v.value, everywhere) for v in optimizer.variables]
    examples = [
        jax.device_put(np.ones((_EXAMPLES, *shape), np.float32), divided)
        for shape in workload.shapes
    ]
    compiled = jax.jit(step, out_shardings=everywhere).lower(values, state, examples).compile()
    sums = _SUM.findall(compiled.as_text())
    return {"sums": len(sums), "bytes": sum(_bytes(result) for result in sums)}


def _bytes(result: str) -> int:
    total = 0
    for kind, bits, shape in _ARRAY.findall(result):
        size = 1 if kind == "pred" else int(bits) // 8
        total += size * int(np.prod([int(n) for n in shape.split(",") if n], dtype=int))
    return total

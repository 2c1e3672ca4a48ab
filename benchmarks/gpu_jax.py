"""What a compiled training step on JAX does on a GPU: kernels, waits, bytes and memory.

    python -m benchmarks.gpu_jax

These are counts and no times. XLA's compiler for GPUs makes each program for an H100
(benchmarks/xla_gpu.py), so two runs give the same text.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import xla_gpu
from benchmarks.rows import Row
from benchmarks.workloads import equal
from benchmarks.xla_gpu import Counts

OPTAX = ("bare", "lossscale", "tracked", "masters", "apply_if_finite", "jmp", "flax")
KERAS = ("bare", "ours_dynamic", "ours_monitored", "peer_dynamic")
LARGE, SMALL = equal(100, 10_000_000), equal(200, 200_000)
ROWS = (
    Row("alone", "optax", "jit", OPTAX, "100 x 100,000", LARGE, optimizer="adam"),
    Row("alone", "optax", "jit", OPTAX, "200 x 1,000", SMALL, optimizer="adam"),
    Row("whole", "optax", "jit", OPTAX, "mlp", optimizer="adam", model="mlp"),
    Row("big", "keras-jax", "jit", KERAS, "100 x 100,000", LARGE),
    Row("small", "keras-jax", "jit", KERAS, "200 x 1,000", SMALL),
)


@functools.cache
def counts(row: Row, method: str, devices: int = 1, divided: bool = False) -> Counts:
    """Compiles a step for H100s, and counts what it does there.

    Args:
        row: One of `ROWS`, or a row like them.
        method: One of its methods.
        devices: How many H100s; all of them have the same gradients unless `divided`.
        divided: Whether parameters, their states and gradients are divided among the devices.
    """
    if row.wrapper == "optax":
        from benchmarks.frameworks.optax import FRAMEWORK
    else:
        from benchmarks.frameworks.jax import FRAMEWORK
    import jax

    program = FRAMEWORK.program(row, method, False)
    mesh = xla_gpu.mesh(devices)

    def placed(leaf: Any) -> Any:
        axes = ("d",) if divided and leaf.shape and not leaf.shape[0] % devices else ()
        return xla_gpu.placed(leaf, mesh, *axes)

    arguments = jax.tree.map(placed, (program.state, program.given))
    return xla_gpu.counts(xla_gpu.compiled(program.function, *arguments, donate=(0,)))


def rows(
    steps: Iterable[Row] = ROWS, methods: Iterable[str] = OPTAX + KERAS
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the tables."""
    for row in steps:
        step = f"{'Optax' if row.wrapper == 'optax' else 'Keras'}, {row.point}"
        for method in (name for name in row.methods if name in methods):
            yield {"step": step, "way": method, **counts(row, method)._asdict()}


def main() -> None:
    """Prints the rows, each as a line of JSON."""
    warnings.simplefilter("ignore")
    for row in rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "jax"
    xla_gpu.prepare()
    main()

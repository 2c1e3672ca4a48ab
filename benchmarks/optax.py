"""What loss scaling with Optax costs: `python -m benchmarks.optax`, in one process without Keras.

Each method is compiled with its state donated, and all of a row run in turns. Time is the
processor's, so that what else the machine does counts less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.timing import as_numbers, interleave, quartiles, ratios

BEGIN, END = "<!-- optax: make bench -->", "<!-- end of optax -->"
METHODS = ("bare", "read", "lossscale", "apply_if_finite", "jmp", "flax")


class Row(NamedTuple):
    """A row of the table: what is stepped, and the goal for the ratio to the bare step.

    Attributes:
        name: What it is called.
        optimizer: The optimizer inside.
        leaves: How many parameters arrays there are, of an optimizer alone.
        parameters: How many parameters they have together.
        model: The model of a whole training step.
        goal: The highest ratio that is aimed at.
        compiled: Whether steps are compiled, or run operation by operation.
    """

    name: str
    optimizer: str
    leaves: int = 0
    parameters: int = 0
    model: str = ""
    goal: float = 0.0
    compiled: bool = True


ROWS = (
    Row("adam, 10M in 100 arrays", "adam", 100, 10**7, goal=1.28),
    Row("adam, 10M in 20 arrays", "adam", 20, 10**7, goal=1.20),
    Row("adam, 10M in 1 array", "adam", 1, 10**7, goal=1.12),
    Row("adam, 200 arrays of 1,000", "adam", 200, 2 * 10**5, goal=1.20),
    Row("adamw with clipping, 10M in 100 arrays", "adamw_clip", 100, 10**7, goal=1.15),
    Row("adam, not compiled, 10 arrays of 1,000", "adam", 10, 10**4, goal=5.0, compiled=False),
    Row("whole step: transformer", "adam", model="transformer", goal=1.05),
    Row("whole step: mlp", "adam", model="mlp", goal=1.05),
    Row("whole step: cnn", "adam", model="cnn", goal=1.20),
)
# A check of each array by itself, added up one by one, compiles for minutes with more of them.
MOST_ARRAYS_OF_PEERS = 100


class Compiled:
    """A program: one method on one row.

    Args:
        method: What has `init` and `step`.
        params: The first parameters.
        given: The gradients, or the batch.
    """

    fresh_each_step = False

    def __init__(self, method: Any, params: Any, given: Any) -> None:
        import jax
        import jax.numpy as jnp

        state = method.init(jax.tree.map(jnp.array, params))
        begin = time.process_time()
        lowered = jax.jit(method.step, donate_argnums=0).lower(state, given)
        self.trace_seconds = time.process_time() - begin
        begin = time.process_time()
        self._step = lowered.compile()
        self.compile_seconds = time.process_time() - begin
        memory = self._step.memory_analysis()
        self.temporary_bytes = memory.temp_size_in_bytes
        self._state, self._given, self._read = state, given, None
        self._ready = jax.block_until_ready

    def costs_beside(self, bare: Compiled) -> dict[str, float]:
        """What a step costs besides its time, JSON-ready."""
        return {
            "trace_ratio": self.trace_seconds / bare.trace_seconds,
            "compile_ratio": self.compile_seconds / bare.compile_seconds,
            "temporary_bytes": self.temporary_bytes - bare.temporary_bytes,
        }

    def prepare(self) -> None:
        """The inputs do not change."""

    def step(self) -> None:
        self._state, self._read = self._step(self._state, self._given)

    def wait(self) -> None:
        self._ready((self._state, self._read))


class Eager(Compiled):
    """A program whose steps are not compiled.

    Args:
        method: What has `init` and `step`.
        params: The first parameters.
        given: The gradients.
    """

    def __init__(self, method: Any, params: Any, given: Any) -> None:
        import jax

        self._state, self._given, self._read = method.init(params), given, None
        self._step, self._ready = method.step, jax.block_until_ready

    def costs_beside(self, bare: Compiled) -> dict[str, float]:
        """Nothing besides its time."""
        return {}


def measure(row: Row, methods: Sequence[str], seconds: float, quick: bool) -> dict[str, Any]:
    """Measures a row; returns what was found, JSON-ready."""
    programs = {name: _program(row, name, quick) for name in methods if _runs(row, name)}
    for _ in range(3):
        for program in programs.values():
            program.step()
            program.wait()
    times = interleave(
        programs,
        rounds=3 if quick else 400,
        steps=1 if quick else 3,
        seconds=seconds,
        fewest=3,
        clock=time.process_time,
    )
    bare = programs["bare"]
    found = {
        name: {
            "seconds": as_numbers(quartiles(times[name])),
            "ratio": as_numbers(ratios(times[name], times["bare"])),
            **program.costs_beside(bare),
        }
        for name, program in programs.items()
    }
    return {"row": row.name, "goal": row.goal, "rounds": len(times["bare"]), "methods": found}


def _runs(row: Row, method: str) -> bool:
    if method == "read":
        return row.compiled and not row.model
    return method not in ("jmp", "flax") or row.leaves <= MOST_ARRAYS_OF_PEERS


def _program(row: Row, name: str, quick: bool) -> Compiled:
    import jax.numpy as jnp
    import numpy as np
    import optax

    from benchmarks.frameworks import optax_methods
    from benchmarks.frameworks.optax_models import MODELS

    inner = {
        "adam": lambda: optax.adam(1e-4),
        "adamw_clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
    }[row.optimizer]()
    if row.model:
        params, loss, batch = MODELS[row.model](quick)
        return Compiled(optax_methods.Whole(name, inner, loss), params, batch)
    method = optax_methods.Alone(name, inner)
    size = (20 if quick else row.parameters) // row.leaves or 1
    random = np.random.default_rng(0)
    factor = np.float32(optax_methods.SCALE if method.scaled else 1)
    params = [jnp.asarray(random.normal(size=size), jnp.float32) for _ in range(row.leaves)]
    given = [jnp.asarray(random.normal(size=size) * factor, jnp.float32) for _ in params]
    return (Compiled if row.compiled else Eager)(method, params, given)


def table(found: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    methods = [name for name in METHODS if name != "bare"]
    lines = [f"| | {' | '.join(methods)} |", f"|---|{'---|' * len(methods)}"]
    for row in found:
        cells = []
        for name in methods:
            one = row["methods"].get(name)
            cells.append("" if one is None else f"{one['ratio']['median']:.2f}")
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _described(one: dict[str, Any]) -> str:
    ratio = one["ratio"]
    text = f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
    if "trace_ratio" in one:
        text += f", trace {one['trace_ratio']:.1f}, compile {one['compile_ratio']:.1f}"
        text += f", {one['temporary_bytes'] / 1e6:.2f} MB"
    return text


def main(command_line: list[str] | None = None) -> int:
    """Measures, prints the table and writes the numbers; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time for each row")
    parser.add_argument("--quick", action="store_true", help="everything is tiny")
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file")
    parser.add_argument("--page", type=pathlib.Path, help="a page whose table is replaced")
    options = parser.parse_args(command_line)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    found = []
    for row in ROWS:
        if options.rows not in row.name:
            continue
        found.append(measure(row, options.methods.split(","), options.seconds, options.quick))
        for name, one in found[-1]["methods"].items():
            print(f"{row.name}: {name} {_described(one)}", file=sys.stderr, flush=True)
        jax.clear_caches()
        gc.collect()
    print(table(found))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"rows": found}))
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        options.page.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

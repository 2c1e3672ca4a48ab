"""PyTorch: how often a step waits for the device, and where `torch.compile` has to stop."""

from __future__ import annotations

import logging
from typing import Any

import keras
import torch
from torch._dynamo.utils import counters

from benchmarks.frameworks.keras_torch import Apply, Calls, Train
from benchmarks.methods import METHODS, SCALE
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.workloads import Workload

_COMPILED_STEPS = 4


def measure(name: str, workload: Workload, small: bool) -> dict[str, int]:
    """Counts what a method does in the optimizer alone and in a whole training step.

    Args:
        name: Of the method.
        workload: What the optimizer is applied to.
        small: Whether the model is tiny and not compiled, and the optimizer alone is followed for
            one compiled step only.
    """
    method = METHODS[name]

    def new_inner(**settings: Any) -> Any:
        return OPTIMIZERS["Adam"](keras.optimizers, **settings)

    found = {}
    program: Any
    for prefix, program in (
        ("apply", Apply(method, workload, new_inner, mode="eager", scale=SCALE)),
        ("train", Train(method, "mlp", new_inner, mode="eager", scale=SCALE, small=small)),
    ):
        program.prepare()
        program.step()
        program.prepare()
        with Calls() as counted:
            program.step()
        found[f"{prefix}_calls"] = counted.calls
        found[f"{prefix}_host_syncs"] = counted.host_syncs
        if not small or prefix == "apply":
            breaks, graphs = _compiled(program, 1 if small else _COMPILED_STEPS)
            found[f"{prefix}_graph_breaks"], found[f"{prefix}_graphs"] = breaks, graphs
    return found


def _compiled(program: Any, steps: int) -> tuple[int, int]:
    """Returns how often tracing stopped in the first steps, and how many graphs there are."""
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch._dynamo.reset()
    counters.clear()
    # What is counted happens before a compiler gets the graphs, so none is needed.
    step = torch.compile(program.step, backend="eager")
    for _ in range(steps):
        program.prepare()
        step()
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]

"""The table of rows to measure, and the processes that measure them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.methods import MONITORS, OPTAX, SKIPPED, TORCH
from benchmarks.workloads import Workload, equal

MODES = {
    "tensorflow": ("function", "xla", "eager", "fit"),
    "tf_keras": ("function", "xla", "eager", "fit"),
    "jax": ("jit", "fit"),
    "torch": ("eager", "fit"),
    "optax": ("jit", "eager"),
    "torch_native": ("fused", "foreach", "single"),
}
"""The modes of a step on each backend."""
BACKENDS = tuple(MODES)
ALL_MODES = tuple(dict.fromkeys(mode for modes in MODES.values() for mode in modes))
CASES = (
    *("big", "small", "sparse", "optimizers", "mlp", "cnn", "skip", "variables", "parameters"),
    *("monitor", "alone", "backward", "whole"),
)
"""The cases; docs/internals/benchmarks.md describes each of them."""

STEP = ("bare", "ours_dynamic", "ours_fixed", "ours_monitored", "peer_dynamic", "peer_fixed")
FLOORS = (*STEP, "read", "unscale")
ALONE = (*FLOORS, "bare_again")
GROWTH = ("bare", "ours_dynamic", "peer_dynamic")
SKIPS = ("bare", *(name + end for name in GROWTH[1:] for end in ("", SKIPPED)))

# A peer's compile time for its branches grows with the square of the number of variables.
MOST_XLA_VARIABLES = 100
# XLA rounds the first update differently if the gradient is multiplied by a number that is not a
# constant, even a power of two; the floor `unscale` shows the same bits. The second is inside a
# branch that is one operation, where Grappler does not fold constants.
_ROUND_OTHERWISE = (
    ("tf_keras-new", "xla", "SGD momentum"),
    ("tf_keras-new", "function", "AdamW clipnorm"),
    ("keras-tensorflow", "function", "AdamW clipnorm"),
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """How a row is timed.

    Args:
        seconds: After this time no new round begins.
        rounds: Maximum number of rounds.
        fewest: Minimum number of rounds, whatever time they take.
        steps: Number of steps in a burst; None for about 20 milliseconds.
        warm: Number of warm-up steps.
        clock: The name of a function of `time`.
    """

    seconds: float = math.inf
    rounds: int = 41
    fewest: int = 7
    steps: int | None = None
    warm: int = 3
    clock: str = "perf_counter"


LONG, SHORT = Timing(6.0), Timing(3.0)
OF_FIT = Timing(rounds=15, steps=1, warm=1)
# CPU time, so that other load on the machine counts less.
OF_OPTAX = Timing(10.0, rounds=400, fewest=3, steps=3, clock="process_time")
OF_TORCH = Timing(steps=4, warm=5, clock="thread_time")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: methods that are compared with each other.

    Args:
        case: One of `CASES`.
        wrapper: The wrapper of the optimizers, such as "keras-jax".
        mode: How the step is run, such as "jit".
        methods: Names of the methods; most are compared with the first.
        point: The difference from the other rows of the case.
        workload: The variables and gradients of an optimizer; None for a whole training step.
        timing: How to time it.
        optimizer: Name of the inner optimizer.
        model: Name of the model of a whole training step.
        structure: Whether to measure memory and graph size too.
        exact: Whether loss scaling must not change a bit of the weights.
        device: The kind of device it runs on.
    """

    case: str
    wrapper: str
    mode: str
    methods: tuple[str, ...]
    point: str = ""
    workload: Workload | None = None
    timing: Timing = SHORT
    optimizer: str = "Adam"
    model: str = ""
    structure: bool = False
    exact: bool = True
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Its name in messages."""
        parts = (self.wrapper, self.mode, self.device, self.case, self.point, self.optimizer)
        return " ".join(part for part in parts if part)


def table(backend: str) -> list[Row]:
    """Returns all rows of a backend."""
    if backend == "optax":
        return list(_of_optax())
    if backend == "torch_native":
        return list(_of_torch())
    return list(_of_keras(backend))


def _of_keras(backend: str) -> Iterator[Row]:
    tf_keras = ("tf_keras-new", "tf_keras-legacy")
    wrappers = tf_keras if backend == "tf_keras" else (f"keras-{backend}",)
    mode, *others, fit = MODES[backend]
    for wrapper in wrappers:
        for each in (mode, *others):
            yield from _of_wrapper(backend, wrapper, each)
    yield Row("monitor", wrappers[0], fit, tuple(MONITORS), timing=OF_FIT)


def _of_wrapper(backend: str, wrapper: str, mode: str) -> Iterator[Row]:
    # tf_keras would take as long as all the others together, so it has fewer rows.
    tf_keras, legacy = backend == "tf_keras", wrapper == "tf_keras-legacy"
    # In eager mode, TensorFlow takes ten times as long.
    slow = mode == "eager" and backend != "torch"
    row = functools.partial(Row, wrapper=wrapper, mode=mode)
    alone = functools.partial(row, methods=GROWTH if slow else ALONE, structure=True)
    yield alone("big", workload=equal(100, 10_000_000), timing=SHORT if slow else LONG)
    if not tf_keras or mode == "function":
        yield alone("small", workload=equal(200, 200_000), timing=SHORT if slow else LONG)
    if backend == "tensorflow":
        work = Workload(((400_000, 64),), rows_touched=512)
        yield row("sparse", methods=ALONE, workload=work, optimizer="SGD")
    for variables, parameters in () if tf_keras else ((8, 10**7), (20, 20_000)):
        work, point = equal(variables, parameters), f"{parameters:,} parameters"
        yield row("skip", methods=SKIPS, point=point, workload=work)
    if slow:
        return
    for model in ("mlp", "cnn"):
        if not legacy or (model, mode) == ("mlp", "function"):
            methods = STEP if tf_keras else FLOORS
            yield row(model, methods=methods, model=model, timing=LONG)
    for optimizer in () if legacy else ("SGD momentum", "AdamW clipnorm"):
        work, exact = equal(8, 2_000_000), (wrapper, mode, optimizer) not in _ROUND_OTHERWISE
        yield row("optimizers", methods=FLOORS, workload=work, optimizer=optimizer, exact=exact)
    if tf_keras:
        return
    for variables in (1, 10, 100, 1000):
        if mode == "xla" and variables > MOST_XLA_VARIABLES:
            continue
        # TensorFlow traces a variable slowly, so a peer is measured with fewer.
        methods = GROWTH[:2] if mode == "function" and variables > 100 else GROWTH
        work, point = equal(variables, variables * 1000), f"{variables:,}"
        yield row("variables", methods=methods, point=point, workload=work)
    for parameters in [10**power for power in range(4, 8)]:
        work, point = equal(8, parameters), f"{parameters:,}"
        yield row("parameters", methods=GROWTH, point=point, workload=work)


def _of_optax() -> Iterator[Row]:
    whole = tuple(name for name in OPTAX if name != "read")
    # With more arrays, a separate check of each array compiles for minutes.
    few = tuple(name for name in OPTAX if name not in ("jmp", "flax"))
    row = functools.partial(Row, wrapper="optax", timing=OF_OPTAX, exact=False)
    for mode, point, optimizer, methods, work in (
        ("jit", "adam, 10M in 100 arrays", "adam", OPTAX, equal(100, 10**7)),
        ("jit", "adam, 10M in 20 arrays", "adam", OPTAX, equal(20, 10**7)),
        ("jit", "adam, 10M in 1 array", "adam", OPTAX, equal(1, 10**7)),
        ("jit", "adam, 200 arrays of 1,000", "adam", few, equal(200, 200_000)),
        ("jit", "adamw with clipping, 10M in 100 arrays", "adamw_clip", OPTAX, equal(100, 10**7)),
        ("eager", "adam, not compiled, 10 arrays of 1,000", "adam", whole, equal(10, 10_000)),
    ):
        made = row("alone", mode=mode, methods=methods, point=point, workload=work)
        yield dataclasses.replace(made, optimizer=optimizer, structure=mode == "jit")
    for model in ("transformer", "mlp", "cnn"):
        made = row("whole", mode="jit", methods=whole, point=f"whole step: {model}")
        yield dataclasses.replace(made, optimizer="adam", model=model, structure=True)


def _of_torch() -> Iterator[Row]:
    row = functools.partial(Row, wrapper="torch", timing=OF_TORCH, optimizer="AdamW")
    shapes = {"10M in 100": ((320, 312),) * 100, "200 x 1000": ((1000,),) * 200}
    mlp = ((512, 784), (512,), *((512, 512), (512,)) * 3, (10, 512), (10,))
    for mode in MODES["torch_native"]:
        methods = tuple(name for name in TORCH if name != "device" or mode == "fused")
        # The work of the verb is in a backward pass.
        alone = tuple(name for name in methods if not name.startswith("verb"))
        methods = tuple(name for name in methods if name != "masters")
        for name, each in shapes.items():
            work, point = Workload(each), f"{mode}, {name}"
            yield row("alone", mode=mode, methods=alone, point=point, workload=work)
        few, work = ("bare", "masters"), Workload(mlp)
        yield row("alone", mode=mode, methods=few, point=f"{mode}, an mlp", workload=work)
        for name, each in shapes.items():
            work, point = Workload(each), f"with an empty backward pass, {mode}, {name}"
            yield row("backward", mode=mode, methods=methods, point=point, workload=work)
    for model in ("mlp", "cnn", "transformer", "mlp, 4 micro-batches", "cnn, 4 micro-batches"):
        point = f"whole step, {model}"
        yield row("whole", mode="fused", methods=TORCH[:-1], point=point, model=model)


def _short_form(rows: Sequence[Row]) -> Iterator[Row]:
    """Returns tiny rows: every case and method in one mode, and every mode in one case."""
    seen, first_mode = set(), {}
    for row in rows:
        kind = (row.case, row.wrapper, row.mode, row.optimizer, row.model)
        is_first = row.mode == first_mode.setdefault(row.case, row.mode)
        if kind in seen or not (is_first or row.case in ("big", "alone")):
            continue
        seen.add(kind)
        work = row.workload
        if work is not None:
            work = Workload(((40, 4),), 4) if work.rows_touched else equal(3, 60)
        yield dataclasses.replace(row, workload=work, methods=_few(row, is_first))


def _few(row: Row, is_first_mode: bool) -> tuple[str, ...]:
    """The methods of a row in the short form."""
    if row.case in ("variables", "parameters", "small", "cnn", "optimizers"):
        return GROWTH[:2]
    if row.case == "mlp" or (row.case == "big" and not is_first_mode):
        return GROWTH
    return row.methods


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that measures the requested rows of one backend.

    Args:
        backend: One of `BACKENDS`.
        cases: Some of `CASES`.
        modes: Some of `ALL_MODES`.
        quick: Whether everything is tiny.
        rounds: Number of timed rounds; None for each row's default.
        device: The kind of device to measure on, "cpu" or "gpu"; empty for all available ones.
    """

    backend: str
    cases: Sequence[str]
    modes: Sequence[str]
    quick: bool = False
    rounds: int | None = None
    device: str = ""

    def rows(self, kinds: Iterable[str] = ("cpu",)) -> list[Row]:
        """Returns the rows to time on each kind of device."""
        rows = [r for r in table(self.backend) if r.case in self.cases and r.mode in self.modes]
        rows = list(_short_form(rows)) if self.quick else rows
        kinds = [kind for kind in kinds if self.device in ("", kind)]
        return [dataclasses.replace(row, device=kind) for kind in kinds for row in rows]

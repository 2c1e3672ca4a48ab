"""What is measured: the rows of the tables, and the processes that measure them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.workloads import Workload, equal

BACKENDS = ("tensorflow", "tf_keras", "jax", "torch")

CASES = {
    "big": "100 variables, 10 million parameters; the optimizer alone",
    "small": "200 variables of 1,000 parameters; the optimizer alone",
    "sparse": "a 400,000 x 64 embedding of which each step touches 512 rows; TensorFlow, SGD",
    "optimizers": "8 variables, 2 million parameters, with SGD with momentum and AdamW with "
    "clipnorm",
    "mlp": "whole training step of a perceptron, 0.67 million parameters, mixed_float16",
    "cnn": "whole training step of a small convolutional network, mixed_float16",
    "skip": "every step overflows, beside steps that are applied",
    "variables": "1 to 1,000 variables of 1,000 parameters",
    "parameters": "10 thousand to 100 million parameters in 8 variables",
    "replicas": "1, 2 and 4 replicas of a MirroredStrategy on virtual CPUs; TensorFlow",
    "collectives": "the sums over 2 and 4 virtual devices in a compiled step; TensorFlow, JAX",
    "host_syncs": "host syncs, and graph breaks under torch.compile; PyTorch",
}
"""What can be asked for, and what it is."""

SHELLS = {
    "tensorflow": ("keras-tensorflow",),
    "tf_keras": ("tf_keras-new", "tf_keras-legacy"),
    "jax": ("keras-jax",),
    "torch": ("keras-torch",),
}
MODES = {
    "tensorflow": ("function", "xla", "eager"),
    "tf_keras": ("function", "xla", "eager"),
    "jax": ("jit",),
    "torch": ("eager",),
}
ALL_MODES = tuple(dict.fromkeys(mode for modes in MODES.values() for mode in modes))

SCALED = ("ours_dynamic", "ours_fixed", "ours_monitored", "peer_dynamic", "peer_fixed")
STEP = ("bare", *SCALED)
FLOORS = (*STEP, "read", "unscale")
ALONE = (*FLOORS, "bare_again")
GROWTH = ("bare", "ours_dynamic", "peer_dynamic")
SKIPPED = "/skipped"
"""At the end of a method's name: every one of its steps overflows."""
SKIPS = ("bare", *(name + end for name in GROWTH[1:] for end in ("", SKIPPED)))

# A peer compiles its branches in a time that grows with the square of the number of variables.
MOST_XLA_VARIABLES = 100
LONG, SHORT = 6.0, 3.0
# XLA rounds this update otherwise as soon as a number that it does not know multiplies the
# gradient, also if that number is a power of two; the floor `unscale` shows the same bits.
_ROUNDS_OTHERWISE = ("tf_keras-new", "xla", "SGD momentum")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: methods that are compared with each other.

    Args:
        case: One of `CASES`.
        shell: The shell of the optimizers, such as "keras-jax".
        mode: How the step is run, such as "jit".
        methods: Names of the methods.
        point: What distinguishes it from the other rows of the case.
        optimizer: Name of the inner optimizer.
        workload: What an optimizer is applied to; None for a whole training step.
        model: Name of the model of a whole training step.
        replicas: How many replicas train; 0 without a strategy.
        structure: Whether memory and graph size are measured too.
        seconds: For how long it is timed.
        exact: Whether loss scaling must leave the bits of the weights as they are without it.
        device: The kind of device it runs on.
    """

    case: str
    shell: str
    mode: str
    methods: tuple[str, ...]
    point: str = ""
    optimizer: str = "Adam"
    workload: Workload | None = None
    model: str = ""
    replicas: int = 0
    structure: bool = False
    seconds: float = SHORT
    exact: bool = True
    device: str = "cpu"

    @property
    def name(self) -> str:
        """What it is called in messages."""
        parts = (self.shell, self.mode, self.device, self.case, self.point, self.optimizer)
        return " ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that measures some cases on so many devices, which are fixed when it starts."""

    backend: str
    cases: tuple[str, ...]
    modes: tuple[str, ...]
    devices: int = 1


def processes(
    backends: Sequence[str], cases: Sequence[str], modes: Sequence[str], quick: bool
) -> list[Process]:
    """Returns the processes that are needed, those with nothing to do left out."""
    found = []
    for backend in backends:
        own = tuple(mode for mode in MODES[backend] if mode in modes)
        most = {"tensorflow": 2 if quick else 4, "jax": 4}.get(backend, 1)
        for devices in (1, 2, 4):
            # JAX divides its devices as it likes; TensorFlow's groups keep their first size.
            if devices > most or (backend == "jax" and devices == 2):
                continue
            here = tuple(case for case in cases if _runs(backend, devices, case))
            if here and own:
                found.append(Process(backend, here, own, devices))
    return found


def _runs(backend: str, devices: int, case: str) -> bool:
    if case == "replicas":
        return backend == "tensorflow"
    if case == "collectives":
        return backend in ("tensorflow", "jax") and devices > 1
    if case == "host_syncs":
        return backend == "torch"
    if case == "sparse":
        return backend == "tensorflow" and devices == 1
    if case in ("variables", "parameters", "skip"):
        return backend != "tf_keras" and devices == 1
    return devices == 1


def _of_tf_keras(row: Row) -> bool:
    """Whether a row is measured for tf_keras too, which takes as long as all the others."""
    new = row.shell == "tf_keras-new"
    if row.case == "big":
        return True
    if row.case == "small":
        return row.mode == "function"
    return new or (row.case, row.mode) == ("mlp", "function")


def rows(process: Process, kinds: Sequence[str], quick: bool) -> list[Row]:
    """Returns the rows of a process.

    Args:
        process: The process.
        kinds: The kinds of device there are, "cpu" and perhaps "gpu".
        quick: Whether everything is tiny.
    """
    found = [
        row
        for row in _rows(process, quick)
        if row.case in process.cases and row.mode in process.modes
        if process.backend != "tf_keras" or _of_tf_keras(row)
    ]
    if quick:
        # Every case and every method in one mode, and every mode in one case.
        found = [
            dataclasses.replace(row, methods=_few(row, row.mode == process.modes[0]))
            for row in found
            if row.mode == process.modes[0] or row.case == "big"
        ]
    return [dataclasses.replace(row, device=kind) for kind in kinds for row in found]


def _few(row: Row, is_first_mode: bool) -> tuple[str, ...]:
    """The methods of a row in the short form."""
    if row.case in ("sparse", "skip") or (row.case == "big" and is_first_mode):
        return row.methods
    wanted = GROWTH if row.case in ("big", "mlp", "replicas") else GROWTH[:2]
    return tuple(name for name in row.methods if name in wanted)


def _rows(process: Process, quick: bool) -> Iterator[Row]:
    if "replicas" in process.cases:
        workload = equal(2, 8) if quick else equal(8, 2_000_000)
        yield Row(
            "replicas",
            "keras-tensorflow",
            "function",
            GROWTH,
            str(process.devices),
            workload=workload,
            replicas=process.devices,
        )
    if process.devices > 1:
        return
    for shell in SHELLS[process.backend]:
        yield from _of_shell(shell, MODES[process.backend], quick)


def _of_shell(shell: str, modes: Sequence[str], quick: bool) -> Iterator[Row]:
    for mode in modes:
        yield from _alone(shell, mode, quick)
        if mode == "eager" and shell != "keras-torch":
            continue
        for model in ("mlp", "cnn"):
            methods = FLOORS if shell.startswith("keras-") else STEP
            yield Row(model, shell, mode, methods, model=model, seconds=LONG)
        for optimizer in ("SGD momentum", "AdamW clipnorm"):
            if (shell, optimizer) == ("tf_keras-legacy", "AdamW clipnorm"):
                continue  # AdamW is no legacy optimizer.
            yield Row(
                "optimizers",
                shell,
                mode,
                FLOORS,
                optimizer=optimizer,
                workload=equal(2, 8) if quick else equal(8, 2_000_000),
                exact=(shell, mode, optimizer) != _ROUNDS_OTHERWISE,
            )
        yield from _growing(shell, mode, quick)


def _alone(shell: str, mode: str, quick: bool) -> Iterator[Row]:
    big = equal(3, 60) if quick else equal(100, 10_000_000)
    small = equal(4, 16) if quick else equal(200, 200_000)
    embedding = Workload(((40, 4),) if quick else ((400_000, 64),), 4 if quick else 512)
    # Operation by operation, TensorFlow takes ten times as long.
    slow = mode == "eager" and shell != "keras-torch"
    methods, seconds = (GROWTH, SHORT) if slow else (ALONE, LONG)
    yield Row("big", shell, mode, methods, workload=big, structure=True, seconds=seconds)
    yield Row("small", shell, mode, methods, workload=small, structure=True, seconds=seconds)
    yield Row("sparse", shell, mode, ALONE, optimizer="SGD", workload=embedding)
    for variables, parameters in ((2, 20),) if quick else ((8, 10**7), (20, 20_000)):
        point = f"{parameters:,} parameters"
        yield Row("skip", shell, mode, SKIPS, point, workload=equal(variables, parameters))


def _growing(shell: str, mode: str, quick: bool) -> Iterator[Row]:
    for variables in (3,) if quick else (1, 10, 100, 1000):
        if mode == "xla" and variables > MOST_XLA_VARIABLES:
            continue
        workload = equal(variables, variables * (4 if quick else 1000))
        # To trace a variable takes TensorFlow long, and a peer is measured with fewer.
        methods = GROWTH[:2] if mode == "function" and variables > 100 else GROWTH
        yield Row("variables", shell, mode, methods, f"{variables:,}", workload=workload)
    for parameters in (20,) if quick else [10**power for power in range(4, 9)]:
        workload = equal(2 if quick else 8, parameters)
        yield Row("parameters", shell, mode, GROWTH, f"{parameters:,}", workload=workload)

"""What a compiled JAX function does on a GPU, counted on a machine without one.

XLA's compiler for GPUs needs no GPU. It is in the wheels jax-cuda12-pjrt and jax-cuda12-plugin:
`compiled` compiles for a description of an H100, up to PTX and CUDA graphs, and `counts` reads the
result. Nothing is run, so no time is measured. The wheels are in a folder of their own, since JAX
would use them wherever it finds them. Call `prepare` before JAX is imported.
"""

from __future__ import annotations

import collections
import importlib.metadata
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WHEELS = ("jax-cuda12-pjrt", "jax-cuda12-plugin")
FOLDER = Path(os.environ.get("LOSSSCALE_XLA_GPU", Path(__file__).parents[1] / ".venv-xla-gpu"))
TARGET = Path(__file__).with_name("h100.pbtxt")


def why_not() -> str:
    """Returns why nothing can be compiled for a GPU here; an empty string if it can."""
    wanted = importlib.metadata.version("jaxlib")
    found = {
        each.metadata["Name"].replace("_", "-"): each.version
        for each in importlib.metadata.distributions(path=[str(FOLDER)])
    }
    for wheel in WHEELS:
        if (version := found.get(wheel)) != wanted:
            there = f"is {version}" if version else "is missing"
            return f"{wheel} {wanted}, XLA's compiler for GPUs, {there} in {FOLDER.name}"
    return ""


def prepare() -> None:
    """Lets JAX find the compiler; call it before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Otherwise the plug-in requires the CUDA libraries of a machine with a GPU.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # A program from a cache would write nothing down.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def mesh(devices: int = 1) -> Any:
    """A mesh with the axis "d" of the H100s in one machine."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    found = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{devices}"
    ).devices
    return jax.sharding.Mesh(np.array(found), ("d",))


def placed(tree: Any, on: Any, *axes: str | None) -> Any:
    """The shapes and dtypes of a tree, on a mesh, divided along these axes."""
    import jax

    place = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*axes))

    def of(leaf: Any) -> Any:
        dtype = jax.dtypes.result_type(leaf)
        return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), dtype, sharding=place)

    return jax.tree.map(of, tree)


class Program(NamedTuple):
    """A compiled function.

    Attributes:
        hlo: Its optimized HLO.
        thunks: What is launched, in order, with the last of the launches that each waits for.
        lowered: Its StableHLO.
        temporary: Temporary memory, in bytes.
    """

    hlo: str
    thunks: str
    lowered: str
    temporary: int


def compiled(function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> Program:
    """Compiles a function for the devices on which its arguments are.

    Raises:
        ValueError: If the function calls the host, which compiles only beside a GPU.
    """
    import jax

    try:
        lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments)
    except RuntimeError as error:
        # To lower a callback, JAX asks for the client of the device.
        if "Unknown backend" in str(error):
            raise ValueError("The function calls the host.") from error
        raise
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        # Without a device nothing can be tuned.
        made = lowered.compile({**options, "xla_gpu_autotune_level": 0})
        dump = {path.name: path.read_text(errors="replace") for path in Path(folder).iterdir()}
    # The second is written only if a pass has changed something.
    thunks = {name.split(".")[-2]: text for name, text in dump.items() if ".thunk_seq" in name}
    return Program(
        made.as_text(),
        thunks.get("thunk_sequence_after_thunk_passes", thunks["thunk_sequence"]),
        lowered.as_text(),
        made.memory_analysis().temp_size_in_bytes,
    )


class Counts(NamedTuple):
    """What a compiled function does on a device.

    Attributes:
        kernels: Kernels, copies and calls of libraries.
        chain: How many of them wait for one another, at most.
        graphs: CUDA graphs, each of which the host launches as one.
        outside: What the host launches by itself.
        waits: Branches and loops for which the host waits, and transfers from or to the host.
        collectives: Exchanges between devices.
        bytes: What all kernels read and write, each operand once.
        temporary: Temporary memory, in bytes.
    """

    kernels: int
    chain: int
    graphs: int
    outside: int
    waits: int
    collectives: int
    bytes: int
    temporary: int


def counts(program: Program) -> Counts:
    """Counts what a compiled function does."""
    thunks = list(_thunks(program.thunks))
    kinds = collections.Counter(thunk.kind for thunk in thunks)
    to_host = program.lowered.count("@annotate_device_placement")
    return Counts(
        kernels=sum(thunk.kind not in _CONTAINERS for thunk in thunks),
        chain=_chain(thunks),
        graphs=kinds["kCommandBuffer"],
        outside=sum(not t.depth and t.kind not in _CONTAINERS for t in thunks),
        waits=to_host + sum(number for kind, number in kinds.items() if kind in _WAITING),
        collectives=sum(n for kind, n in kinds.items() if kind.startswith(_COLLECTIVE)),
        bytes=_bytes(program.hlo),
        temporary=program.temporary,
    )


# --- What is launched -----------------------------------------------------------------------------

_CONTAINERS = {"kCommandBuffer", "kSequential", "kConditional", "kWhile"}
# Of a branch or a loop outside of a CUDA graph the host reads the condition.
_WAITING = {"kConditional", "kWhile", "kHostSend", "kHostRecv", "kInfeed", "kOutfeed"}
_WAITING |= {"kHostExecuteStart", "kHostExecuteDone", "kHostSendDone", "kHostRecvDone"}
_COLLECTIVE = ("kAllReduce", "kAllGather", "kAllToAll", "kReduceScatter", "kCollective", "kRagged")


class _Thunk(NamedTuple):
    depth: int
    number: int
    kind: str
    after: int | None


def _thunks(text: str) -> Iterator[_Thunk]:
    for line in text.splitlines():
        found = re.match(r"( *)(\d+): (k\w+)\s+\[(.*?)\]", line)
        if found:
            indent, number, kind, edges = found.groups()
            before = re.search(r"prev=(\d+)", edges)
            yield _Thunk(len(indent), int(number), kind, int(before[1]) if before else None)


def _chain(thunks: Sequence[_Thunk]) -> int:
    """The longest chain; what is inside of a thunk begins with it, what waits for it follows."""
    ends: dict[tuple[int, int], int] = {}
    around: list[tuple[_Thunk, int]] = []
    for thunk in thunks:
        while around and around[-1][0].depth >= thunk.depth:
            around.pop()
        before = ends.get((thunk.depth, thunk.after), 0) if thunk.after is not None else 0
        begin = max(around[-1][1] if around else 0, before)
        end = begin + (thunk.kind not in _CONTAINERS)
        around.append((thunk, begin))
        for outer, _ in around:
            place = outer.depth, outer.number
            ends[place] = end if outer is thunk else max(ends[place], end)
    return max(ends.values(), default=0)


# --- What is read and written ---------------------------------------------------------------------

# They run nothing on the device.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}


def _bytes(hlo: str) -> int:
    """What all instructions outside of fusions read and write."""
    computations = _computations(hlo)

    def of(name: str) -> int:
        total = 0
        sizes = {each.name: _size(each.shape) for each in computations[name]}
        for each in computations[name]:
            if inner := _called(each):
                total += sum(of(branch) for branch in inner)
            elif each.opcode not in _FREE and not each.opcode.endswith("-done"):
                total += sizes[each.name] + sum(sizes.get(each, 0) for each in each.operands)
        return total

    return of("ENTRY")


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    attributes: str


def _called(each: _Instruction) -> list[str]:
    """The computations that run as a part of an instruction; those of a fusion are one kernel."""
    if each.opcode == "call":
        names = "to_apply"
    elif each.opcode in ("while", "conditional"):
        names = "body|condition|true_computation|false_computation|branch_computations"
    else:
        return []
    lists = re.findall(rf"(?:{names})=(?:\{{(.*?)\}}|(%[\w.\-]+))", each.attributes)
    return [name for found in lists for name in re.findall(r"%[\w.\-]+", "".join(found))]


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    """The instructions of each computation; that of the program is under "ENTRY"."""
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?(%[\w.\-]+) \(.*\{$", line)
        if head:
            current = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif each := re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*)$", line):
            current.append(_instruction(*each.groups()))
    return found


def _instruction(name: str, text: str) -> _Instruction:
    end = _closed(text) + 1 if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].strip()
    opcode, text = text[: text.index("(")], text[text.index("(") :]
    end = _closed(text)
    return _Instruction(name, shape, opcode, re.findall(r"%[\w.\-]+", text[:end]), text[end:])


def _closed(text: str) -> int:
    """Where the parenthesis with which a text starts is closed."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if not depth:
            return place
    raise ValueError(text)


def _size(shape: str) -> int:
    """The bytes of a shape, or of all parts of a tuple."""
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = re.match(r"[a-z]+(\d+)", dtype)
        elements = math.prod(int(number) for number in dims.split(",") if number)
        total += elements * (int(bits[1]) // 8 if bits else dtype == "pred")
    return total

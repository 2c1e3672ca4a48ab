"""What a training step on PyTorch asks of a GPU: waits, launches, bytes and allocations.

    python -m benchmarks.gpu_torch

These are counts and no times, of the simulated CUDA device (tests/simulated_cuda), so two runs give
the same text. A launch is an operator that computes: `_foreach_`, fused and `_amp_` ones have one
for 65,536 x 320 elements and some tens of tensors; views and `empty` none. Bytes are what it reads
and writes. A step puts gradients in place, in a backward pass, scales and steps the optimizer.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
from simulated_cuda import device

if "torch" not in sys.modules:  # tools.gpu_counts, which has imported it, counts on a real GPU
    device.start()

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lossscale
from benchmarks.frameworks.torch_native import WAYS, Way

SCALE = 2.0**10

# --- Counts ---------------------------------------------------------------------------------------

CHUNK, BLOCKS = 65_536, 320
MOST_TENSORS = (110, 64, 48, 36, 30)
"""How many tensors a launch takes, for one list of them, two and so on."""
FREE = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
) | {"lift_fresh", "_unsafe_view", "is_same_size", "detach", "alias", "_local_scalar_dense"}
OVERWRITE = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))


class Recorder(TorchDispatchMode):
    """Counts what the operators of a block do on the device.

    Attributes:
        launches: How many, by the name of the operator.
        bytes: How many are read and written.
        allocations: How many new tensors.
        waits: The waits of the host, by what waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: collections.Counter[str] = collections.Counter()
        self.bytes = self.allocations = 0
        self.waits: list[str] = []

    def __enter__(self) -> Recorder:
        device.taken()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.waits = device.taken()

    def counts(self) -> dict[str, int]:
        """Returns the numbers of a table."""
        return {
            "waits": len(self.waits),
            "launches": self.launches.total(),
            "bytes": self.bytes,
            "allocations": self.allocations,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        inputs, outputs = _on_device((args, kwargs)), _on_device(result)
        known = {id(t) for t in inputs}
        new = [t for t in outputs if id(t) not in known]
        if (inputs or outputs) and not func.is_view:
            if name not in ("lift_fresh", "detach", "alias"):
                self.allocations += len(new)
            if name not in FREE:
                self._count(func, name, args, kwargs or {}, inputs, new)
        return result

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, inputs: Any, new: Any) -> None:
        written = []
        for place, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _on_device(value)
        only = set()
        if name in OVERWRITE or func._overloadname == "out":
            only = {id(t) for t in written}
        read = [t for t in inputs if id(t) not in only]
        self.bytes += sum(t.nbytes for t in (*read, *written, *new))
        self.launches[name] += _launches(name, [*args, *kwargs.values()])


def _on_device(value: Any) -> list[Any]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_cuda]


def _launches(name: str, values: Sequence[Any]) -> int:
    """How many kernels an operator launches."""
    kinds = (list, tuple)
    lists = [v for v in values if isinstance(v, kinds) and v and len(_on_device(v)) == len(v)]
    if not lists:
        return 1
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach")):
        # `cat` and `stack` take 128 tensors a launch.
        return math.ceil(len(lists[0]) / 128) if name in ("cat", "stack") else 1
    count = len(lists)
    if name.startswith("_fused_"):
        # The counts of steps are no list of the kernel.
        count -= all(t.numel() == 1 for t in lists[-1]) and lists[0][0].numel() > 1
    elif not name.endswith("_") and name != "_foreach_norm":
        count += 1
    sizes = collections.defaultdict(list)
    for t in lists[0]:
        sizes[t.device, t.dtype].append(t.numel())
    made = sum(_launches_of(each, count) for each in sizes.values())
    if name == "_foreach_norm":
        # One more adds up the chunks of 110 tensors.
        made += sum(math.ceil(len(each) / MOST_TENSORS[0]) for each in sizes.values())
    return made


def _launches_of(sizes: Sequence[int], lists: int) -> int:
    """How many kernels ATen's multi_tensor_apply launches for lists of tensors of these sizes."""
    most = MOST_TENSORS[min(lists, len(MOST_TENSORS)) - 1]
    launches = tensors = blocks = 0
    for size in filter(None, sizes):
        tensors += 1
        chunks = math.ceil(size / CHUNK)
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if (tensors == most and is_last) or blocks == BLOCKS:
                launches, blocks = launches + 1, 0
                tensors = 0 if is_last else 1
    return launches + bool(blocks)


# --- Rows -----------------------------------------------------------------------------------------

LAYOUTS = {"100 x 100,000": [(100_000,)] * 100, "200 x 1,000": [(1000,)] * 200}
ADAMW, SGD = (torch.optim.AdamW, {"lr": 1e-4}), (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9})
OPTIMIZERS = {
    "AdamW fused": (*ADAMW, {"fused": True}),
    "AdamW fused, capturable": (*ADAMW, {"fused": True, "capturable": True}),
    "AdamW foreach": (*ADAMW, {"foreach": True}),
    "AdamW foreach, capturable": (*ADAMW, {"foreach": True, "capturable": True}),
    "SGD fused": (*SGD, {"fused": True}),
    "SGD foreach": (*SGD, {"foreach": True}),
}


class _Filled(torch.autograd.Function):
    """A loss whose backward pass puts given gradients in place."""

    @staticmethod
    def forward(ctx: Any, start: Any, gradients: Any, *parameters: Any) -> Any:
        ctx.gradients = gradients
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.gradients


def prepared(
    way: str,
    optimizer: str,
    shapes: Sequence[Any],
    clip_norm: float | None,
    optimizers: int = 1,
    **settings: Any,
) -> tuple[Way, Callable[[], Any]]:
    """Returns a way to train, and a function that makes the loss of the next step.

    Args:
        way: One of `WAYS`.
        optimizer: One of `OPTIMIZERS`.
        shapes: Of the parameters.
        clip_norm: What gradients are clipped to, or None.
        optimizers: How many, each with a part of the parameters.
        settings: Passed to `Way`.
    """
    cls, numbers, flags = OPTIMIZERS[optimizer]
    parameters = [torch.nn.Parameter(torch.ones(shape, device="cuda")) for shape in shapes]
    inners = [cls(parameters[n::optimizers], **numbers, **flags) for n in range(optimizers)]
    start = torch.ones((), device="cuda", requires_grad=True)

    def loss() -> Any:
        for p in parameters:
            p.grad = None
        return _Filled.apply(start, [torch.full_like(p, 0.01) for p in parameters], *parameters)

    return Way(way, inners, clip_norm, **{"scale": SCALE, **settings}), loss


def counted(
    way: str,
    optimizer: str,
    shapes: Sequence[Any],
    clip_norm: float | None = None,
    optimizers: int = 1,
    prepare: Callable[[Way], Any] = lambda way: None,
) -> Recorder:
    """Counts the third step, in which nothing is made or seen for the first time.

    Args:
        way, optimizer, shapes, clip_norm, optimizers: As for `prepared`.
        prepare: Called with the way before the first step.
    """
    made, loss = prepared(way, optimizer, shapes, clip_norm, optimizers)
    prepare(made)
    for _ in range(3):
        value = loss()
        with Recorder() as recorder:
            made.backward(value)
            made.step()
    return recorder


class _Block(torch.nn.Module):
    """A block of a transformer, 12 parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = (
            torch.nn.Linear(width, 4 * width),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.before(x)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2)) * (width // self.heads) ** -0.5
        attention = scores.float().softmax(-1).to(value.dtype)
        mixed = (attention @ value).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.out(mixed)
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.between(x))))


MODEL_WAYS = {
    "autocast, PyTorch's scaler": (False, "PyTorch's scaler"),
    "autocast, backward": (False, "backward"),
    "float16, PyTorch's scaler": (True, "PyTorch's scaler"),
    "float16, drop-in": (True, "drop-in"),
    "float16, backward": (True, "backward"),
    "float16, scale_loss": (True, "scale_loss"),
    "float16, device": (True, "device"),
    "float16, grad_dtype=None, backward": (True, "backward"),
}
"""Whole steps: whether the parameters are float16, with `MasterWeights`, and one of `WAYS`."""


def of_model(way: str, optimizer: str, micro_batches: int, width: int = 64) -> Recorder:
    """Counts the third whole step of a transformer with 51 parameters.

    Args:
        way: One of `MODEL_WAYS`.
        optimizer: One of `OPTIMIZERS`.
        micro_batches: How many losses add up to the gradients of a step.
        width: Of the transformer, whose vocabulary has 128 tokens.
    """
    is_half, verb = MODEL_WAYS[way]
    cls, numbers, flags = OPTIMIZERS[optimizer]
    blocks = [_Block(width, 4) for _ in range(4)]
    ends = torch.nn.Embedding(128, width), torch.nn.Linear(width, 128)
    model = torch.nn.Sequential(ends[0], *blocks, ends[1])
    model.to("cuda", torch.float16 if is_half else torch.float32)
    inner = cls(model.parameters(), **numbers, **flags)
    if is_half:
        grad_dtype = None if "grad_dtype=None" in way else torch.float32
        inner = lossscale.torch.MasterWeights(inner, grad_dtype=grad_dtype)
    made = Way(verb, [inner], scale=SCALE)
    tokens = torch.zeros((4, 32), dtype=torch.int64, device="cuda")
    for _ in range(3):
        with Recorder() as recorder:
            made.inners[0].zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cuda", torch.float16, enabled=not is_half):
                    logits = model(tokens)
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens.flatten()
                )
                made.backward(loss / micro_batches)
            made.step()
    return recorder


def of_keras(way: str, inner: str) -> tuple[Recorder, list[Any]]:
    """Counts the third call of `apply` of Keras 3; returns the variables, too.

    Args:
        way: One of `KERAS_WAYS`.
        inner: One of `KERAS_INNERS`.
    """
    import keras

    made = getattr(keras.optimizers, inner)(1e-4, **KERAS_INNERS[inner])
    if way != "bare":
        cls: Any = lossscale if way == "ours" else keras.mixed_precision
        made = cls.LossScaleOptimizer(made, initial_scale=SCALE)
    variables = [keras.Variable(torch.ones(100)) for _ in range(10)]
    made.build(variables)
    for _ in range(3):
        loss = torch.full((), 0.01, device="cuda")
        scaled = loss if way == "bare" else made.scale_loss(loss)
        gradients = [scaled.repeat(100) for _ in variables]
        with Recorder() as recorder:
            made.apply(gradients, variables)
    return recorder, variables


KERAS_WAYS = ("bare", "ours", "Keras' class")
KERAS_INNERS: dict[str, dict[str, float]] = {"Adam": {}, "SGD": {"momentum": 0.9}}


def steps(layouts: Iterable[str] = tuple(LAYOUTS)) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the name of each step, and for each of its ways the arguments of `prepared`."""
    for layout, optimizer, clip_norm in itertools.product(layouts, OPTIMIZERS, (None, 1.0)):
        step = f"{optimizer}, {layout}" + (", clipped" if clip_norm else "")
        for way in WAYS:
            # Only fused optimizers can skip their own step.
            if way != "device" or "fused" in optimizer:
                yield step, (way, optimizer, LAYOUTS[layout], clip_norm)


def rows(layouts: Iterable[str] = tuple(LAYOUTS)) -> Iterator[tuple[dict[str, Any], Recorder]]:
    """Yields the rows of the tables, and what they count."""
    for step, arguments in steps(layouts):
        found = counted(*arguments)
        yield {"step": step, "way": arguments[0], **found.counts()}, found
    for inner, way in itertools.product(KERAS_INNERS, KERAS_WAYS):
        found, _ = of_keras(way, inner)
        yield {"step": f"Keras, {inner}, 10 x 100", "way": way, **found.counts()}, found


MODEL_STEPS = tuple(itertools.product(("AdamW fused", "AdamW foreach"), (1, 4)))


def rows_of_models(
    steps: Iterable[tuple[str, int]] = MODEL_STEPS,
) -> Iterator[tuple[dict[str, Any], Recorder]]:
    """Yields the rows of whole steps, and what they count."""
    for optimizer, micro_batches in steps:
        step = f"Transformer, {optimizer}, micro-batches: {micro_batches}"
        for way in MODEL_WAYS:
            if not way.endswith("device") or "fused" in optimizer:
                found = of_model(way, optimizer, micro_batches)
                yield {"step": step, "way": way, **found.counts()}, found


def main() -> None:
    """Prints the rows, each as a line of JSON."""
    warnings.simplefilter("ignore")
    os.environ["KERAS_BACKEND"] = "torch"
    for row, _ in itertools.chain(rows(), rows_of_models()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

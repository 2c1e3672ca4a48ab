"""Float32 masters of narrow parameters: compared by bits, rounded; and what cannot have them."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lossscale.errors import StateDictError, UnsupportedError
from lossscale.torch import ranks
from lossscale.torch.optimizer_list import parts_of

Pairs = list[tuple[Tensor, Tensor]]
"""Parameters, each with its master."""
# A type guard of a class that cannot be one of tensors.
_is_composed: Callable[[object], bool] = is_traceable_wrapper_subclass
NARROW = frozenset({torch.float16, torch.bfloat16})
_BY_MASTERS = (
    "Wrap the optimizer in lossscale.torch.MasterWeights(optimizer) first, which updates float32 "
    "copies of the parameters. Make both after model.half(), after the first call of lazy modules, "
    "and again after parameters were replaced. Or keep the parameters in float32 (model.float()) "
    "and compute under torch.autocast(device, torch.float16)."
)
_OTHERWISE = (
    "Keep the parameters in float32 and leave MasterWeights out. For float16, use "
    "MixedPrecisionPolicy(param_dtype=torch.float16) with FSDP2 (fully_shard), "
    "MixedPrecision(param_dtype=torch.float16) with FSDP1, and torch.autocast(device, "
    "torch.float16) with tensor parallelism and ZeroRedundancyOptimizer."
)
_TOGETHER = {"cpu": 2**15}
"""Elements that are compared together, in a few times their memory: in a cache, or all that fit."""


def is_narrow(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that gets a master, or of such a dtype."""
    return isinstance(value, Tensor) and value.dtype in NARROW and not is_lazy(value)


def _by_kind(pairs: Pairs) -> Iterable[Pairs]:
    """The pairs by the device and dtype of the parameter, as kernels of many tensors need them."""
    groups: dict[tuple[torch.device, torch.dtype], Pairs] = {}
    for pair in pairs:
        groups.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    return groups.values()


@torch.no_grad()
def round_into(pairs: Pairs) -> None:
    """Rounds masters into their parameters."""
    for some in _by_kind(pairs):
        torch._foreach_copy_([parameter for parameter, _ in some], [master for _, master in some])


def _together(pairs: Pairs) -> Iterator[Pairs]:
    """Parts of pairs that are compared together."""
    most = _TOGETHER.get(pairs[0][0].device.type, 2**26)
    sums = itertools.accumulate(parameter.numel() for parameter, _ in pairs)
    for _, part in itertools.groupby(zip(sums, pairs, strict=True), lambda each: each[0] // most):
        yield [pair for _, pair in part]


def merged(pairs: Pairs, waits: bool = False) -> Iterator[tuple[Pairs, list[Tensor]]]:
    """Parts of pairs, and their masters with what was written into the parameters.

    An element of a master is replaced if the parameter is not its rounding, by their bits. Wide
    parameters were the roundings of their masters before anything was written into them.

    Args:
        pairs: Parameters with their masters.
        waits: Whether the host may wait to leave out parts without a change. On a CPU it always
            does, which is no wait.
    """
    for part in (part for some in _by_kind(pairs) for part in _together(some)):
        if not is_narrow(part[0][0]):
            yield part, [_where_rounded(p, master) for p, master in part]
            continue
        parameters, masters = ([pair[place] for pair in part] for place in (0, 1))
        now, wide = _flatten_dense_tensors(parameters), _flatten_dense_tensors(masters)
        bits, expected = now.view(torch.int16), wide.to(now.dtype).view(torch.int16)
        if (waits or now.device.type == "cpu") and is_same(bits, expected):
            continue
        wide = torch.where(bits == expected, wide, now)
        yield part, list(_unflatten_dense_tensors(wide, masters))


@torch.no_grad()
def adopt(pairs: Pairs) -> None:
    """Replaces elements of masters whose narrow parameters other code has overwritten.

    Wide parameters continue from their masters, where they are the rounded masters.
    """
    for part, values in merged(pairs):
        are_narrow = is_narrow(part[0][0])
        # Of `data`: the graph of a loss may hold the parameter.
        torch._foreach_copy_([m if are_narrow else p.data for p, m in part], values)


def _where_rounded(parameter: Tensor, master: Tensor) -> Tensor:
    """The master, or the parameter where it is not the rounded master; as the parameter is wide."""
    are_same = [parameter == master.to(dtype) for dtype in NARROW]
    return torch.where(are_same[0] | are_same[1], master.to(parameter.dtype), parameter)


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether tensors have the same bits; compared eight bytes at a time, which is faster."""
    flat = [tensor.reshape(-1).view(torch.int16) for tensor in (first, second)]
    if all(t.storage_offset() % 4 == len(t) % 4 == 0 for t in flat):
        flat = [tensor.view(torch.int64) for tensor in flat]
    return torch.equal(*flat)


# --- What cannot have masters, and what cannot be one -------------------------------------------


def with_held(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds, as Lookahead does."""
    optimizers = [optimizer]
    for holder in optimizers:
        held = (value for value in vars(holder).values() if hasattr(value, "param_groups"))
        optimizers += [value for value in held if all(value is not other for other in optimizers)]
    return optimizers


def check_can_have_masters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    narrow = list(filter(is_narrow, parameters))
    if not narrow:
        return
    if not hasattr(Tensor, "grad_dtype"):
        raise UnsupportedError(
            "MasterWeights needs PyTorch 2.10 or later, where gradients of float16 parameters can "
            f"be float32. Received: PyTorch {torch.__version__}. Keep the parameters in float32 "
            "and compute under torch.autocast(device, torch.float16)."
        )
    for parameter in narrow:
        if ranks.is_spread(parameter) or hasattr(parameter, "_fsdp_flattened"):
            raise UnsupportedError(
                f"A parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype} is "
                f"sharded, and can have no master. {_OTHERWISE}"
            )
    _check_distinct(narrow)
    # Such as ZeroRedundancyOptimizer, which would update the parameters themselves.
    lists = {id(group["params"]) for group in optimizer.param_groups}
    ids = set(map(id, narrow))
    for held in with_held(optimizer):
        of_groups = [("param_groups", g["params"]) for g in held.param_groups]
        attributes = [(n, v) for n, v in vars(held).items() if n not in ("state", "param_groups")]
        for name, value in of_groups + attributes:
            if id(value) not in lists and not ids.isdisjoint(_ids_in(value)):
                raise UnsupportedError(
                    f"{type(held).__name__} keeps parameters in its attribute {name!r}, and would "
                    f"not find their masters there. {_OTHERWISE}"
                )


def in_float32(optimizer: Optimizer | None) -> str:
    """What to do about float16 parameters of an optimizer, for messages."""
    try:
        for part in [] if optimizer is None else parts_of(optimizer):
            check_can_have_masters(part, ranks.parameters_of(part))
    except UnsupportedError as error:
        return str(error)
    return _BY_MASTERS


def _check_distinct(parameters: Iterable[Tensor]) -> None:
    """Refuses parameters that begin with the same element, as those do that `.data` ties."""
    have_memory = (p for p in parameters if p.numel() and not (p.is_meta or _is_composed(p)))
    firsts: dict[tuple[torch.device, int], Tensor] = {}
    for parameter in have_memory:
        key = parameter.device, parameter.data_ptr()
        if firsts.setdefault(key, parameter) is not parameter:
            raise UnsupportedError(
                "Two parameters have the same elements, and would have two masters. Received: "
                f"shapes {tuple(firsts[key].shape)} and {tuple(parameter.shape)}. Tie weights by "
                "one parameter: decoder.weight = encoder.weight."
            )


def _ids_in(value: object, depth: int = 3) -> Iterator[int]:
    """The ids of tensors in a collection, and integers, which may be ids."""
    if torch.is_tensor(value) or isinstance(value, int):
        yield value if isinstance(value, int) else id(value)
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        parts = itertools.chain(*value.items()) if isinstance(value, dict) else value
        for part in parts:
            yield from _ids_in(part, depth - 1)


def check_value(parameter: Tensor | None, value: object, *, finite: bool = False) -> None:
    """Checks that a value can be the master of a parameter; None is one of another optimizer."""
    shape = None if parameter is None else parameter.shape
    if parameter is None or not isinstance(value, Tensor) or value.shape != shape:
        expected = "of the optimizer" if shape is None else f"of shape {tuple(shape)}"
        raise StateDictError(
            f"A master must be a tensor of the shape of its parameter, a parameter {expected}. "
            f"Received: {reprlib.repr(value)}. Load or set the weights of the same model."
        )
    if finite and not value.to(parameter.dtype).isfinite().all():
        raise StateDictError(
            f"A master must be finite when it is rounded to {parameter.dtype}. Received: "
            f"{reprlib.repr(value)}, whose largest number is {value.abs().max().item():.3g}."
        )

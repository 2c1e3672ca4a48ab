"""Narrow parameters and their float32 masters: compared by their bits, and rounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parameter import is_lazy

Pairs = list[tuple[Tensor, Tensor]]
"""Parameters, each with its master."""


NARROW = frozenset({torch.float16, torch.bfloat16})
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
    most, part, size = _TOGETHER.get(pairs[0][0].device.type, 2**26), Pairs(), 0
    for pair in pairs:
        size += pair[0].numel()
        if part and size > most:
            yield part
            part, size = [], pair[0].numel()
        part.append(pair)
    yield part


def merged(pairs: Pairs, waits: bool = False) -> Iterator[tuple[Pairs, list[Tensor]]]:
    """Parts of pairs, and their masters with what was written into the parameters.

    An element of a master is replaced if the parameter is not its rounding, by their bits. Wide
    parameters are the roundings of parked masters before anything is written into them.

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

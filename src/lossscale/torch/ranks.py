"""More than one process: which of them have to agree on a step, and how they do.

A tensor that is spread over processes (a DTensor, of `fully_shard` and of tensor parallelism) is
in part on each of them, so an overflow is seen by one and not by the others. One number says
whether any was seen: its maximum is taken over the group of every mesh dimension along which a
parameter is spread. Where gradients are summed before (`DistributedDataParallel`), an overflow
reaches every process by itself, and nothing is sent.

What is added up over the same groups, a norm or how many elements are large, counts each number
once: a process gives its part divided by the number of processes that have the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from lossscale.errors import ArgumentTypeError


def _dtensor() -> Any:
    """The class of tensors that are spread over processes; None where there can be none."""
    # Importing it takes as long as half of PyTorch.
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def local(tensor: Any) -> Any:
    """The part of a tensor that this process holds; the tensor itself if it is not spread.

    Args:
        tensor: Tensor of any kind, or None.
    """
    return _arrived(tensor._local_tensor) if is_spread(tensor) else tensor


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is spread over processes, as a DTensor."""
    spread = _dtensor()
    return spread is not None and isinstance(tensor, spread)


def _arrived(tensor: Any) -> Any:
    # The result of a collective that nobody waited for yet is not a plain tensor.
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def is_part_of_sum(tensor: Any) -> bool:
    """Whether a tensor is the sum of what several processes have (`Partial`)."""
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def added_up(gradient: Any, parameter: Any) -> Any:
    """A gradient that is a part of a sum, added up and spread as its parameter is.

    Parts that are finite may have a sum that is not, or the other way round, so that nothing can
    be said of a step before. The optimizer would do the same, in each of its operations.

    Args:
        gradient: A DTensor. All processes of its mesh call this.
        parameter: Its parameter.
    """
    return gradient.redistribute(placements=parameter.placements)


def groups_of(tensors: Iterable[Any], process_group: Any = None) -> tuple[Any, ...]:
    """The process groups over which one verdict has to be reduced, in order.

    They follow from parameters and not from gradients, so that a process without a gradient takes
    part.

    Args:
        tensors: The parameters, in an order that is the same in all processes.
        process_group: A `torch.distributed.ProcessGroup`, or a sequence of them: then these, and
            nothing is derived. For parameters that are spread by other means than DTensors
            (pipelines, experts, shards by hand). None to derive them.

    Returns:
        The groups with more than one process; empty if processes need not agree.

    Raises:
        ArgumentTypeError: If `process_group` is none of these. It is a `TypeError`.

    Example:
        >>> groups_of([torch.nn.Parameter(torch.zeros(3))])
        ()

    Source: `DTensor` and `DeviceMesh`, https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """
    if process_group is not None:
        return _checked(process_group)
    spread = _dtensor()
    if spread is None:
        return ()
    groups: list[Any] = []
    seen: set[Any] = set()
    for tensor in tensors:
        if not isinstance(tensor, spread):
            continue
        layout = tensor.device_mesh, tensor.placements
        # Most parameters of a model have one layout, and a mesh is slow to ask.
        if layout in seen:
            continue
        seen.add(layout)
        for group in _groups_of_layout(*layout):
            if not any(group is other for other in groups):
                groups.append(group)
    return tuple(groups)


def _groups_of_layout(mesh: Any, placements: Sequence[Any]) -> list[Any]:
    if mesh.get_coordinate() is None:
        # A process outside of the mesh holds nothing of the tensor.
        return []
    return [
        mesh.get_group(dimension)
        for dimension, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    ]


def copies(tensor: Any, groups: Sequence[Any], *, given: bool = False) -> int:
    """How many times a sum over groups would count each number of a tensor.

    Args:
        tensor: A parameter or a gradient, that is no part of a sum.
        groups: What `groups_of` returned.
        given: Whether the caller has said which groups these are. Then nothing follows from a
            tensor that is whole here, and each process is taken to have one of its own.
    """
    if not given:
        spread = groups_of([tensor])
        return math.prod(group.size() for group in groups if all(group is not g for g in spread))
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    members = [set(distributed.get_process_group_ranks(group)) for group in groups]
    count = 1
    for dimension, placement in enumerate(placements):
        if mesh is not None and placement.is_replicate() and mesh.size(dimension) > 1:
            alike = set(distributed.get_process_group_ranks(mesh.get_group(dimension)))
            if any(alike <= of_group for of_group in members):
                count *= len(alike)
    return count


def _checked(process_group: Any) -> tuple[Any, ...]:
    given = process_group if isinstance(process_group, (list, tuple)) else [process_group]
    kinds: tuple[Any, ...] = ()
    if distributed.is_available():
        kinds = (distributed.ProcessGroup,)
        # What `new_group` returns to a process that is not in the group.
        given = [group for group in given if group is not distributed.GroupMember.NON_GROUP_MEMBER]
    for group in given:
        if not isinstance(group, kinds):
            raise ArgumentTypeError(
                "`process_group` must be a torch.distributed.ProcessGroup or a list of them, such "
                "as torch.distributed.group.WORLD (once the process group is initialized) or "
                "mesh.get_group('dp'); None derives the groups from the parameters. Received: "
                f"process_group={process_group!r} of type {type(process_group).__name__}."
            )
    return tuple(group for group in given if group.size() > 1)


def agreed(found: Any, groups: Sequence[Any]) -> Any:
    """The largest of what the processes found, the same in all of them.

    Args:
        found: float32 scalar tensor, 1 if an overflow was found here, else 0.
        groups: What `groups_of` returned. The maximum is taken over one after the other, in all
            processes in the same order; over the dimensions of one mesh all of its processes agree.

    Returns:
        A float32 scalar tensor on the device of `found`; `found` itself if there are no groups.

    Example:
        >>> agreed(torch.tensor(1.0), ())
        tensor(1.)
    """
    for group in groups:
        sent = found.to(_device(found, group))
        distributed.all_reduce(sent, op=distributed.ReduceOp.MAX, group=group)
        found = sent.to(found.device)
    return found


def added(numbers: Any, groups: Sequence[Any]) -> Any:
    """What the processes have of some numbers, added up; the same in all of them.

    Args:
        numbers: float64 tensor, in which counts are exact.
        groups: What `groups_of` returned.
    """
    for group in groups:
        sent = numbers.to(_device(numbers, group), copy=True)
        distributed.all_reduce(sent, group=group)
        numbers = sent.to(numbers.device)
    return numbers


def largest_and_added(numbers: Any, groups: Sequence[Any]) -> Any:
    """The largest of the first number of all processes, and the sums of the others.

    Args:
        numbers: float64 tensor of one dimension. It is sent once for each group.
        groups: What `groups_of` returned.
    """
    for group in groups:
        sent = numbers.to(_device(numbers, group))
        of_all = [torch.empty_like(sent) for _ in range(group.size())]
        distributed.all_gather(of_all, sent, group=group)
        stacked = torch.stack(of_all)
        together = torch.cat([stacked[:, :1].amax(0), stacked[:, 1:].sum(0)])
        numbers = together.to(numbers.device)
    return numbers


def _device(found: Any, group: Any) -> Any:
    """Where a group can send from: not from the processor if gradients are kept there off-load."""
    served = {device.type: device for device in group._device_types}
    return (
        found.device if not served or found.device.type in served else next(iter(served.values()))
    )

"""More than one process: which of them have to agree on a step, and how they do.

A tensor that is spread over processes (a DTensor, of `fully_shard` and of tensor parallelism) is
in part on each of them, so an overflow is seen by one and not by the others. One number says
whether any was seen: its maximum is taken over the group of every mesh dimension along which a
parameter is spread. Where gradients are summed before (`DistributedDataParallel`), an overflow
reaches every process by itself, and nothing is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import distributed

from lossscale.errors import ArgumentTypeError


def _dtensor() -> Any:
    """The class of tensors that are spread over processes; None where there can be none."""
    # Importing it takes as long as half of PyTorch.
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def local(tensor: Any) -> Any:
    """The part of a tensor that this process holds; the tensor itself if it is not spread.

    A part of a sum (`Partial`) is taken as it is: to unscale the parts is to unscale the sum.

    Args:
        tensor: Tensor of any kind, or None.
    """
    spread = _dtensor()
    if spread is None or not isinstance(tensor, spread):
        return tensor
    return _arrived(tensor._local_tensor)


def _arrived(tensor: Any) -> Any:
    # The result of a collective that nobody waited for yet is not a plain tensor.
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def groups_of(tensors: Iterable[Any], process_group: Any = None) -> tuple[Any, ...]:
    """The process groups over which one verdict has to be reduced, in order.

    They follow from parameters and not from gradients, so that a process without a gradient takes
    part. Gradients may be given after them: one that is a part of a sum (`Partial`) along a
    dimension that no parameter is spread over adds the group of that dimension.

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


def _device(found: Any, group: Any) -> Any:
    """Where a group can send from: not from the processor if gradients are kept there off-load."""
    served = {device.type: device for device in group._device_types}
    return (
        found.device if not served or found.device.type in served else next(iter(served.values()))
    )

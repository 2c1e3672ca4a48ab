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

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from lossscale.errors import ArgumentTypeError, UnsupportedError

HALF = (torch.float16, torch.complex32)
"""Formats in which gradients are not divided: small ones would flush to zero."""


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


class ParameterInfo:
    """What is known of a list of parameters, for as long as it is of these parameters.

    Args:
        parameters: The parameters.
        process_group: As `groups_of` takes it.

    Attributes:
        devices: Where they were when this was made.
        has_half: Whether one is of a format that gradients cannot be divided in.
        is_plain: Whether they are on one device, and none is of a format that gradients cannot be
            divided in.
        groups: The process groups that have to agree.
        is_given: Whether the caller named some of them: then processes may do different things.
        is_sharded: Whether what is computed with may be other tensors, as FSDP's are.
        always_due: Whether gradients were seen to share memory.
    """

    always_due = False
    _times = _before = 0

    def __init__(self, parameters: list[Any], process_group: Any = None) -> None:
        self.parameters = list(parameters)
        self.devices = list(dict.fromkeys(p.device for p in parameters))
        self.has_half = any(p.dtype in HALF for p in parameters)
        self.is_plain = len(self.devices) == 1 and not self.has_half
        self.groups = groups_of(parameters, process_group)
        self.is_given = process_group is not None
        self.ids = frozenset(map(id, parameters))
        self.is_sharded = any(is_spread(p) or hasattr(p, "_fsdp_flattened") for p in parameters)
        self._dtype = parameters[0].dtype if parameters else None
        self._derived = _derived(parameters)
        self._copies: dict[Any, int] = {}

    def is_of(self, parameters: list[Any]) -> bool:
        """Whether it is about these parameters, where they are now."""
        mine = self.parameters
        return (
            len(parameters) == len(mine)
            and all(map(operator.is_, parameters, mine))
            # `model.to` and `model.half` change parameters where they are, all at once.
            and (not mine or (mine[0].device, mine[0].dtype) == (self.devices[0], self._dtype))
        )

    def is_due(self, gradients: int) -> bool:
        """Whether it is time to see if gradients share memory, which takes half as long as a step.

        It follows from the graph: at first, when their number changes, and then now and again.
        """
        self._times += 1
        due = self._times <= 4 or self._times % 16 == 0 or gradients != self._before
        self._before = gradients
        return due or self.always_due

    def first_gradient(self) -> Any:
        """The first gradient that there is, or None."""
        return next((g for p in self.parameters if (g := p.grad) is not None), None)

    def copies(self, gradient: Any) -> int:
        """How many times a sum over `groups` would count each number of a gradient."""
        # Most gradients of a model have one layout, and a mesh is slow to ask.
        spread = getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None)
        if spread not in self._copies:
            self._copies[spread] = copies(gradient, self.groups, self._derived)
        return self._copies[spread]


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer's groups, in order; nobody changes the list."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        parameters: list[Any] = groups[0]["params"]
        return parameters
    return list(itertools.chain.from_iterable(g["params"] for g in groups))


def groups_of(tensors: Iterable[Any], process_group: Any = None) -> tuple[Any, ...]:
    """The process groups over which one verdict has to be reduced, in order.

    They follow from parameters and not from gradients, so that a process without a gradient takes
    part.

    Args:
        tensors: The parameters, in an order that is the same in all processes.
        process_group: A `torch.distributed.ProcessGroup`, or a sequence of them, which come first.
            For what does not follow from DTensors (stages of a pipeline, shards by hand). An empty
            sequence stands for none at all.

    Returns:
        The groups with more than one process; empty if processes need not agree.

    Raises:
        ArgumentTypeError: If `process_group` is none of these.
        UnsupportedError: If parameters are sharded by FSDP1, and no group is given.

    Examples:
        >>> groups_of([torch.nn.Parameter(torch.zeros(3))])
        ()

    Source: `DTensor` and `DeviceMesh`, https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """
    tensors = list(tensors)
    if process_group is None and any(map(_is_of_fsdp1, tensors)):
        raise UnsupportedError(
            "A parameter is sharded by FullyShardedDataParallel, which hides its process group. "
            "The processes must skip a step together. Pass the group that the model was sharded "
            "over: process_group=torch.distributed.group.WORLD if it was given none."
        )
    given = () if process_group is None else _checked(process_group)
    if isinstance(process_group, (list, tuple)) and not process_group:
        return ()
    # What is given stays: a process without parameters derives nothing, and takes part too.
    return (*given, *(group for group in _derived(tensors) if not _is_in_any(group, given)))


def _is_in_any(group: Any, others: Sequence[Any]) -> bool:
    members = set(distributed.get_process_group_ranks(group)) if others else set()
    return any(members <= set(distributed.get_process_group_ranks(other)) for other in others)


def _derived(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """The groups of every mesh dimension that a tensor is spread over."""
    spread = _dtensor()
    groups: list[Any] = []
    seen: set[Any] = set()
    for tensor in tensors if spread is not None else ():
        if not isinstance(tensor, spread):
            continue
        layout = tensor.device_mesh, tensor.placements
        # Most parameters of a model have one layout, and a mesh is slow to ask.
        if layout in seen:
            continue
        seen.add(layout)
        groups += [group for group in _groups_along(tensor) if not _is_one_of(group, groups)]
    return tuple(groups)


def _is_of_fsdp1(tensor: Any) -> bool:
    return (
        getattr(tensor, "_fsdp_flattened", False)
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _groups_along(tensor: Any, *, replicated: bool = False) -> list[Any]:
    """The groups of the mesh dimensions that a tensor is spread over, or is replicated along."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    # A process outside of the mesh holds nothing of the tensor.
    if mesh is None or mesh.get_coordinate() is None:
        return []
    return [
        mesh.get_group(dimension)
        for dimension, placement in enumerate(placements)
        if placement.is_replicate() == replicated and mesh.size(dimension) > 1
    ]


def copies(tensor: Any, groups: Sequence[Any], derived: Sequence[Any]) -> int:
    """How many times a sum over groups would count each number of a tensor.

    Along a group that follows from the parameters a tensor that is not spread there is the same
    for all. Of a group that was given nothing is known: its processes have different tensors
    (stages), unless the tensor's own mesh says that it is replicated within.

    Args:
        tensor: A parameter or a gradient, that is no part of a sum.
        groups: What `groups_of` returned.
        derived: Those that follow from the parameters.
    """
    own = _derived([tensor])
    following = [group for group in groups if _is_one_of(group, derived)]
    different: int = math.prod(group.size() for group in own)
    for group in groups:
        if not _is_one_of(group, following) and not _is_in_any(group, following):
            along = [*own, *_groups_along(tensor, replicated=True)]
            within = [part.size() for part in along if _is_in_any(part, [group])]
            different *= group.size() // math.prod(within)
    counted: int = math.prod(group.size() for group in groups)
    return counted // different


def _is_one_of(group: Any, others: Sequence[Any]) -> bool:
    return any(group is other for other in others)


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


def agreed(
    overflow: Any, has_gradients: bool, is_scaled: bool, groups: Sequence[Any]
) -> tuple[Any, Any]:
    """What the processes found together, the same in all of them, in one message for each group.

    Args:
        overflow: float32 scalar tensor, 1 if an overflow was found here, else 0.
        has_gradients: Whether there was any gradient here.
        is_scaled: Whether a loss was scaled here.
        groups: What `groups_of` returned. The maximum is taken over one after the other, in all
            processes in the same order; over the dimensions of one mesh all of its processes agree.

    Returns:
        float32 scalar tensors: 1 if one process found an overflow, 0 if none, -1 if there is no
        gradient anywhere; and 1 if a loss was scaled somewhere, else 0.

    Examples:
        >>> agreed(torch.tensor(1.0), True, True, ())
        (tensor(1.), tensor(1.))
    """
    scaled = torch.full_like(overflow, float(is_scaled))
    found = torch.stack([overflow if has_gradients else overflow - 1, scaled])
    for group in groups:
        sent = found.to(_device(found, group), copy=True)
        distributed.all_reduce(sent, op=distributed.ReduceOp.MAX, group=group)
        found = sent.to(found.device)
    return found[0], found[1]


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


class JoinHook:
    """What a process does for the others once it has run out of data.

    Args:
        shadow: Takes part in a step of the others.
        leave: Called when all have run out.

    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """

    def __init__(self, shadow: Callable[[], None], leave: Callable[[], None]) -> None:
        self.main_hook, self._leave = shadow, leave

    def post_hook(self, is_last_joiner: bool) -> None:
        """All processes have run out of data."""
        self._leave()

"""Several processes: which of them must skip a step together, and how they agree.

Each process holds a part of a sharded tensor (a DTensor of `fully_shard` or tensor parallelism), so
one process may see an overflow that the others do not. They agree by one number, 1 for an overflow:
its maximum is taken over the group of every mesh dimension along which a parameter is sharded.
`DistributedDataParallel` sums the gradients first, so that every process sees the overflow, and no
message is needed.

Sums over the same groups, of a squared norm or of large elements, count each number once: a process
divides its part by the number of processes that hold a copy.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lossscale.errors import ArgumentTypeError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

HALF = (torch.float16, torch.complex32)
"""Formats in which gradients are not divided: small ones would flush to zero."""
WIDENED = "_is_widened_by_lossscale"
"""The mark of a parameter whose `MasterWeights` takes gradients of any dtype."""
MaybeTensor = TypeVar("MaybeTensor", bound=Tensor | None)
Group: TypeAlias = "distributed.ProcessGroup"
Groups: TypeAlias = "distributed.ProcessGroup | Sequence[distributed.ProcessGroup] | None"
"""What users pass as `process_group`."""
UNSEEN = torch._C.DisableTorchFunction
"""Within it no mode sees a call: with a default device, each `.grad` would take microseconds."""


def _dtensor() -> type[DTensor] | None:
    """The class of sharded tensors; None if it is not imported, so that no such tensor exists."""
    # Not imported here: that takes half as long as importing PyTorch.
    module = sys.modules.get("torch.distributed.tensor")
    sharded: type[DTensor] | None = getattr(module, "DTensor", None)
    return sharded


def local(tensor: MaybeTensor) -> MaybeTensor:
    """The part of a tensor that this process holds; the tensor itself if it is not sharded.

    Args:
        tensor: Tensor of any kind, or None.
    """
    if not is_spread(tensor):
        return tensor
    part = tensor._local_tensor
    # An asynchronous collective returns a tensor that must be waited for.
    return cast(MaybeTensor, part.wait() if hasattr(part, "wait") else part)


def is_spread(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    spread = _dtensor()
    return spread is not None and isinstance(tensor, spread)


def has_half_gradients(tensor: Tensor) -> bool:
    """Whether gradients of a tensor have a dtype in which they cannot be divided."""
    if tensor.dtype not in HALF or is_widened(tensor):
        return False
    # PyTorch 2.10 lets leaves choose another one, as `MasterWeights` does.
    chosen = getattr(tensor, "grad_dtype", None) if tensor.is_leaf else None
    return chosen is None or chosen in HALF


def is_widened(tensor: Tensor) -> bool:
    """Whether gradients arrive in the narrow dtype of a parameter, and become float32 then."""
    return hasattr(tensor, WIDENED) and tensor.grad_dtype is None


class ParameterInfo:
    """Facts about a list of parameters; made again when the list changes.

    Args:
        parameters: The parameters.
        process_group: As `groups_of` takes it.

    Attributes:
        ids: Their ids.
        devices: Their devices when this was made.
        device: The first of them; the CPU if there is none.
        has_half: Whether one has gradients of a dtype in which they cannot be divided.
        groups: The process groups that must agree.
        is_given: Whether the user passed process groups: their processes may run different code.
        is_sharded: Whether the model computes with other tensors, as FSDP does.
        places: Where the gradients lay when they were last found to share no memory.
    """

    places: list[int] | None = None

    def __init__(self, parameters: Sequence[Tensor], process_group: Groups = None) -> None:
        self.parameters = list(parameters)
        self.devices = list(dict.fromkeys(p.device for p in parameters))
        self.device = self.devices[0] if parameters else torch.device("cpu")
        self.has_half = any(map(has_half_gradients, parameters))
        self.groups = groups_of(parameters, process_group)
        self.is_given = process_group is not None
        self.ids = frozenset(map(id, parameters))
        self.is_sharded = any(is_spread(p) or hasattr(p, "_fsdp_flattened") for p in parameters)
        self._dtype = parameters[0].dtype if parameters else None
        self._has_lazy = any(map(is_lazy, parameters))
        self._derived = _derived(parameters)
        self._copies: dict[tuple[object, object], int] = {}

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, on the same devices."""
        mine = self.parameters
        return (
            not self._has_lazy
            and len(parameters) == len(mine)
            and all(map(operator.is_, parameters, mine))
            # `model.to` and `model.half` change all parameters in place.
            and (not mine or (mine[0].device, mine[0].dtype) == (self.device, self._dtype))
        )

    def without(self, ids: Set[int]) -> ParameterInfo:
        """Facts about the parameters that are not among some."""
        if self.ids.isdisjoint(ids):
            return self
        return ParameterInfo([p for p in self.parameters if id(p) not in ids], [])

    def gradients(self) -> list[Tensor]:
        """The gradients that are not None."""
        with UNSEEN():
            return [gradient for p in self.parameters if (gradient := p.grad) is not None]

    def first_gradient(self) -> Tensor | None:
        """The first gradient that is not None; None if there is none."""
        with UNSEEN():
            return next((g for p in self.parameters if (g := p.grad) is not None), None)

    def last_gradient(self) -> Tensor | None:
        """The last gradient that is not None: what optimizers share tends to come first."""
        with UNSEEN():
            return next((g for p in reversed(self.parameters) if (g := p.grad) is not None), None)

    def copies(self, gradient: Tensor) -> int:
        """The number of times that a sum over `groups` counts each number of a gradient.

        Within a derived group, all processes hold the same of a tensor that is not sharded. Within
        a given group they hold different tensors (stages), unless the tensor's own mesh replicates
        it there.

        Args:
            gradient: A gradient that is not `Partial`, or a parameter.
        """
        # Reading a mesh is slow, and most gradients of a model share one layout.
        layout = getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None)
        if layout in self._copies:
            return self._copies[layout]
        sharded = _derived([gradient])
        parts = math.prod(group.size() for group in sharded)
        derived = [group for group in self.groups if group in self._derived]
        for group in self.groups:
            if group not in derived and not _is_in_any(group, derived):
                # Each process has another part, except along the dimensions of the mesh.
                along = [*sharded, *_groups_along(gradient, replicated=True)]
                within = [other.size() for other in along if _is_in_any(other, [group])]
                parts *= group.size() // math.prod(within)
        self._copies[layout] = math.prod(group.size() for group in self.groups) // parts
        return self._copies[layout]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer's groups, in order. Do not change the list."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        parameters: list[Tensor] = groups[0]["params"]
        return parameters
    return list(itertools.chain.from_iterable(g["params"] for g in groups))


def groups_of(tensors: Iterable[Tensor], process_group: Groups = None) -> tuple[Group, ...]:
    """Returns the process groups that must agree on a step, in order.

    They are derived from parameters, not from gradients, so that a process without a gradient takes
    part.

    Args:
        tensors: The parameters, in the same order in all processes.
        process_group: A `torch.distributed.ProcessGroup`, or a sequence of them, which come first:
            for groups that cannot be derived from DTensors (stages of a pipeline, shards made by
            hand). With an empty sequence there are no groups at all.

    Returns:
        The groups with more than one process; empty if each process decides alone.

    Raises:
        ArgumentTypeError: If `process_group` is something else.
        UnsupportedError: If parameters are sharded by FSDP1, and no group is given.

    Examples:
        >>> groups_of([torch.nn.Parameter(torch.zeros(3))])
        ()

    Source: `DTensor` and `DeviceMesh`, https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """
    tensors = list(tensors)
    of_fsdp1 = any(getattr(tensor, "_fsdp_flattened", False) for tensor in tensors)
    if process_group is None and of_fsdp1 and has_others():
        raise UnsupportedError(
            "A parameter is sharded by FullyShardedDataParallel, which hides its process group. "
            "The processes must skip a step together. Pass the group that the model was sharded "
            "over: process_group=torch.distributed.group.WORLD if it was given none."
        )
    given = () if process_group is None else _checked(process_group)
    if isinstance(process_group, (list, tuple)) and not process_group:
        return ()
    # A process without parameters can derive no group, and must use the given ones.
    return (*given, *(group for group in _derived(tensors) if not _is_in_any(group, given)))


def _is_in_any(group: Group, others: Sequence[Group]) -> bool:
    members = set(distributed.get_process_group_ranks(group)) if others else set()
    return any(members <= set(distributed.get_process_group_ranks(other)) for other in others)


def _derived(tensors: Iterable[Tensor]) -> tuple[Group, ...]:
    """The groups of every mesh dimension that a tensor is sharded over."""
    groups: list[Group] = []
    seen: set[tuple[object, object]] = set()
    for tensor in () if _dtensor() is None else filter(is_spread, tensors):
        layout = tensor.device_mesh, tensor.placements
        # Reading a mesh is slow, and most parameters of a model share one layout.
        if layout not in seen:
            seen.add(layout)
            groups += [group for group in _groups_along(tensor) if group not in groups]
    return tuple(groups)


def _groups_along(tensor: Tensor, *, replicated: bool = False) -> list[Group]:
    """The groups of the mesh dimensions along which a tensor is sharded, or replicated."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    # A process outside the mesh holds no part of the tensor.
    if mesh is None or mesh.get_coordinate() is None:
        return []
    return [
        mesh.get_group(dimension)
        for dimension, placement in enumerate(placements)
        if placement.is_replicate() == replicated and mesh.size(dimension) > 1
    ]


def _checked(process_group: Any) -> tuple[Group, ...]:
    given = process_group if isinstance(process_group, (list, tuple)) else [process_group]
    kinds: tuple[type[Group], ...] = ()
    if distributed.is_available():
        kinds = (distributed.ProcessGroup,)
        # `new_group` returns this to a process that is not in the group.
        given = [group for group in given if group is not distributed.GroupMember.NON_GROUP_MEMBER]
    for group in given:
        if not isinstance(group, kinds):
            raise ArgumentTypeError(
                "`process_group` must be a torch.distributed.ProcessGroup or a list of them. "
                f"Received: process_group={process_group!r} of type "
                f"{type(process_group).__name__}. Pass torch.distributed.group.WORLD (once the "
                "process group is initialized) or mesh.get_group('dp'); None derives the groups "
                "from the parameters."
            )
    return tuple(group for group in given if group.size() > 1)


def has_others() -> bool:
    """Whether other processes take part in the training."""
    here = distributed.is_available() and distributed.is_initialized()
    return bool(here and distributed.get_world_size() > 1)


def agreed(
    overflow: Tensor, has_gradients: bool, is_scaled: bool, groups: Sequence[Group]
) -> tuple[Tensor, Tensor]:
    """Returns what the processes found together, by one message for each group.

    Args:
        overflow: float32 scalar tensor, 1 if this process found an overflow, else 0.
        has_gradients: Whether this process has a gradient.
        is_scaled: Whether this process scaled a loss.
        groups: What `groups_of` returned. The maximum is taken over one group after the other, in
            the same order in all processes.

    Returns:
        float32 scalar tensors, the same in all processes: 1 if one found an overflow, 0 if none
        did, -1 if none has a gradient; and 1 if one scaled a loss, else 0.

    Examples:
        >>> agreed(torch.tensor(1.0), True, True, ())
        (tensor(1.), tensor(1.))
    """
    scaled = torch.full_like(overflow, float(is_scaled))
    # Gradients that have overflowed may be gone.
    numbers = torch.stack([overflow if has_gradients else 2 * overflow - 1, scaled])
    largest = reduced(numbers, groups, "MAX")
    return largest[0], largest[1]


def reduced(numbers: Tensor, groups: Sequence[Group], op: Literal["MAX", "SUM"]) -> Tensor:
    """Returns the sums or maxima of numbers over the processes, the same in all of them.

    Args:
        numbers: A tensor; sums are of float64, in which counts are exact.
        groups: What `groups_of` returned.
        op: The operation.
    """
    for group in groups:
        sent = numbers.to(_device(numbers, group), copy=True)
        distributed.all_reduce(sent, op=getattr(distributed.ReduceOp, op), group=group)
        numbers = sent.to(numbers.device)
    return numbers


def _device(numbers: Tensor, group: Group) -> torch.device:
    """The device that a group sends from: not the CPU if gradients are only offloaded there."""
    served = group._device_types
    own = [device for device in served if device.type == numbers.device.type]
    return served[0] if served and not own else numbers.device

"""The gradients of a step, as dense tensors of real numbers that can be changed in place.

PyTorch's optimizers read `.grad`, as other code does between `backward` and `step`. So gradients
are unscaled in place: the values that can be read are those that are applied.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lossscale.errors import GradientsError
from lossscale.torch import ranks
from lossscale.torch.masters import in_float32, round_into
from lossscale.torch.ranks import ParameterInfo, local
from lossscale.torch.scaling import CPU, real_parts, scalar, unscaled, widened

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lossscale.torch.scale import Multiplier

_DTYPE = operator.attrgetter("dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_PLAIN_TYPES = frozenset({Tensor, Parameter})
_ONE = functools.partial(scalar, 1.0)
_IN_PLACE = frozenset({torch.float32, torch.float64, torch.bfloat16})

Stamps: TypeAlias = tuple[list[int], list[int]]
"""What `stamps` returns: the ids and the versions of gradients."""
Pair: TypeAlias = tuple[Tensor, Tensor]
"""A gradient, with the dense tensor of real numbers that it is stored in."""
Factor: TypeAlias = Callable[[torch.device], Tensor]
"""Returns a float32 scalar tensor on a device."""


class Gradients(NamedTuple):
    """The gradients of a step, and the dense tensors of real numbers that hold them.

    Attributes:
        grads: The gradients that are not None.
        dense_groups: The tensors that hold their numbers, by device and dtype, as kernels need
            them.
        owners: The gradient of each of these tensors.
    """

    grads: list[Tensor]
    dense_groups: list[list[Tensor]]
    owners: list[list[Tensor]]


def collect(
    info: ParameterInfo,
    grads: list[Tensor] | None = None,
    *,
    allow_float16: bool = False,
    sums: bool = True,
) -> Gradients:
    """Returns the gradients of parameters, ready to be changed in place.

    A gradient that cannot be changed in place is replaced in `.grad`. So is a `Partial` one, by its
    sum, which the optimizer would compute and which must be checked; and if two share memory, all
    are replaced by copies.

    Args:
        info: The parameters, whose `.grad` may be None.
        grads: Their gradients that are not None, if these are listed already.
        allow_float16: Whether some may be in float16: to be checked, and not divided.
        sums: Whether to add up sparse values with the same index, whose sum can overflow.

    Raises:
        GradientsError: If one is in float16, where dividing it would flush it to zero. Nothing was
            changed.
    """
    grads = info.gradients() if grads is None else grads
    if len(info.devices) == 1 and _PLAIN_TYPES.issuperset(map(type, grads)):
        # One loop in C for each property: a loop over tuples takes twice the time.
        with ranks.UNSEEN():
            dtypes = set(map(_DTYPE, grads))
            fit = _IN_PLACE | {torch.float16} if allow_float16 else _IN_PLACE
            are_ready = len(dtypes) == 1 and dtypes <= fit and not any(map(Tensor.is_neg, grads))
        if dtypes == {torch.bfloat16} and not allow_float16:
            are_ready = are_ready and not any(map(ranks.is_widened, info.parameters))
        if are_ready and not share_memory(grads, info):
            return Gradients(grads, [grads], [grads])
    if not allow_float16:
        check_can_be_divided(info)
    given = _all_dense(info, allow_float16, sums)
    if share_memory([tensor for group in given.dense_groups for tensor in group], info):
        with torch.enable_grad():
            for parameter in info.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        given = _all_dense(info, allow_float16, sums)
    return given


def share_memory(tensors: Sequence[Tensor], info: ParameterInfo) -> bool:
    """Whether two tensors share memory, or one shares it with itself, as an expanded one does.

    Autograd gives the same gradient, or views of it, to each term of a sum. Each must be divided
    once. Those of a step tend to lie where those of the step before did, which is quick to see.
    """
    with ranks.UNSEEN():
        try:
            starts = list(map(Tensor.data_ptr, tensors))
        except RuntimeError:
            # A sparse one has no memory of its own: its values have.
            return True
        if starts == info.places:
            return False
        ends = []
        for tensor, start in zip(tensors, starts, strict=True):
            last = tensor.numel()
            if not tensor.is_contiguous():
                strides = zip(tensor.shape, tensor.stride(), strict=True)
                last = sum((size - 1) * stride for size, stride in strides) + 1
            if last < tensor.numel():
                return True
            ends.append(start + last * tensor.element_size())
    shared = any(map(operator.gt, sorted(ends), sorted(starts)[1:]))
    # If each parameter has a gradient, the same places mean the same sizes.
    info.places = None if shared or len(starts) < len(info.parameters) else starts
    return shared


def of_tensors(tensors: Iterable[Tensor]) -> Gradients:
    """Dense tensors of real numbers, which may be changed in place."""
    return _grouped([(tensor, tensor) for tensor in tensors])


def _grouped(pairs: list[Pair]) -> Gradients:
    groups: dict[tuple[torch.device, torch.dtype], list[Pair]] = {}
    for gradient, values in pairs:
        if values.is_floating_point() and values.numel():
            groups.setdefault((values.device, values.dtype), []).append((gradient, values))
    return Gradients(
        [gradient for gradient, _ in pairs],
        [[values for _, values in group] for group in groups.values()],
        [[gradient for gradient, _ in group] for group in groups.values()],
    )


def _all_dense(info: ParameterInfo, allow_float16: bool, sums: bool) -> Gradients:
    if not allow_float16:
        _convert(info, torch.float32)
    owning = [(p, gradient) for p in info.parameters if (gradient := p.grad) is not None]
    return _grouped([_dense(p, gradient, allow_float16, sums) for p, gradient in owning])


def _dense(parameter: Tensor, gradient: Tensor, allow_float16: bool, sums: bool) -> Pair:
    """The gradient of a parameter, and the dense tensor of real numbers that it is stored in."""
    if gradient.dtype in ranks.HALF and not allow_float16:
        parameter.grad = gradient = gradient.to(parameter.dtype)
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        # Finite summands may have an infinite sum, and the optimizer would add them up as well.
        summands, to = cast("DTensor", gradient), cast("DTensor", parameter).placements
        parameter.grad = gradient = summands.redistribute(placements=to)
    sums = sums or gradient.dtype in ranks.HALF
    if sums and gradient.layout == torch.sparse_coo and not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    if gradient.is_conj() or gradient.is_neg():
        # A lazy conjugate or negative cannot be changed in place.
        parameter.grad = gradient = gradient.resolve_conj().resolve_neg()
    values = ranks.local(gradient.detach())
    if values.layout != torch.strided:
        values = values._values() if values.layout == torch.sparse_coo else values.values()
    return gradient, torch.view_as_real(values) if values.is_complex() else values


def check_can_be_divided(info: ParameterInfo, optimizer: Optimizer | None = None) -> None:
    """Checks that no gradient is in float16, where dividing it would flush it to zero."""
    for parameter in info.parameters:
        dtype = None if parameter.grad is None else parameter.grad.dtype
        if dtype not in ranks.HALF or ranks.is_widened(parameter):
            continue
        fix = "Set `parameter.grad_dtype = None`."
        if parameter.dtype == dtype:
            fix = in_float32(optimizer)
        elif getattr(parameter, "grad_dtype", None) is None:
            continue
        raise GradientsError(
            f"Small unscaled gradients of dtype {dtype} would flush to zero. Received: a parameter "
            f"of shape {tuple(parameter.shape)} and dtype {parameter.dtype}. {fix}"
        )


# --- The 2-norm of all gradients together, and clipping to it -----------------------------------


def grad_norm(
    gradients: Gradients, info: ParameterInfo, dtype: torch.dtype | None = None
) -> Tensor:
    """The 2-norm of all gradients together: a float32 or float64 scalar tensor.

    Args:
        gradients: The gradients that this process has.
        info: Their parameters, with the process groups that they are sharded over.
        dtype: The dtype in which squares are added up; None for that of the gradients.

    Returns:
        The norm, the same in all processes; 0 if none has a gradient.
    """
    groups = gradients.dense_groups
    norms = [norm for group in groups for norm in torch._foreach_norm(group, 2.0, dtype)]
    device = groups[0][0].device if groups else CPU
    if norms and not info.groups:
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
        return norm
    squares = scalar(0.0, device, torch.float64)
    owners = [gradient for group in gradients.owners for gradient in group]
    for gradient, part in zip(owners, norms, strict=True):
        squares += part.to(device, torch.float64) ** 2 / info.copies(gradient)
    return ranks.reduced(squares, info.groups, "SUM").sqrt()


def coefficient(norm: Tensor, clip_norm: float) -> Tensor:
    """The factor that clips gradients of a norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)


# --- Checks and unscales gradients in one pass over memory --------------------------------------

_OF_THE_KERNEL = frozenset({torch.float32, torch.float64, torch.float16})
"""The dtypes that the kernel supports on every accelerator."""


def unscale_and_check_(
    gradients: Gradients,
    factor: Factor,
    *,
    divide: bool = False,
    recheck: bool = False,
    into: Tensor | None = None,
) -> dict[torch.device, Tensor]:
    """Checks each number of gradients, and unscales them in place.

    Args:
        gradients: The gradients.
        factor: Returns what they are multiplied by, on a device: float32 scalar tensor.
        divide: Whether they are divided by it instead: by a scale that is no power of two, whose
            reciprocal is not exact.
        recheck: Whether to check what comes out. A scale below 1 makes some infinite.
        into: A tensor to write to, for the device that it is on.

    Returns:
        By device, whether any number was infinite or NaN: float32 scalar tensor, 1 or 0. Empty if
        there was none to check.
    """
    if divide or recheck:
        unscale_(gradients, factor, divide=divide)
        factor = _ONE
    by_device: dict[torch.device, Tensor] = {}
    for group in gradients.dense_groups:
        device = group[0].device
        if device not in by_device:
            if into is not None and into.device == device:
                by_device[device] = into
            else:
                by_device[device] = torch.zeros((), dtype=torch.float32, device=device)
        if device.type == "cpu" or group[0].dtype in _OF_THE_KERNEL:
            kernel = torch._amp_foreach_non_finite_check_and_unscale_
            kernel(group, by_device[device], factor(device))
        else:
            _check_largest(group, by_device[device], 1.0)
            torch._foreach_mul_(group, factor(device))
    return by_device


def check(gradients: Gradients) -> dict[torch.device, Tensor]:
    """Checks gradients as `unscale_and_check_` does, and changes none."""
    return unscale_and_check_(gradients, _ONE)


def unscale_(gradients: Gradients, factor: Factor, *, divide: bool = False) -> None:
    """Unscales gradients in place without a check, which takes less time."""
    for group in gradients.dense_groups:
        multiply = torch._foreach_div_ if divide else torch._foreach_mul_
        multiply(group, factor(group[0].device))


def check_quotients(gradients: Gradients, divisor: Factor) -> dict[torch.device, Tensor]:
    """Checks quotients of gradients that a kernel will divide; changes none, waits for no device.

    Args:
        gradients: The gradients.
        divisor: Returns on a device what they are divided by: float32 scalar tensor. Below 1 it
            makes infinities of finite numbers.

    Returns:
        As `unscale_and_check_`.
    """
    by_device: dict[torch.device, Tensor] = {}
    for group in gradients.dense_groups:
        device = group[0].device
        _check_largest(group, by_device.setdefault(device, scalar(0.0, device)), divisor(device))
    return by_device


def _check_largest(group: list[Tensor], overflow: Tensor, divisor: Tensor | float) -> None:
    # The largest magnitude of finite numbers is finite in any dtype.
    largest = widened(torch.stack(torch._foreach_norm(group, float("inf")))) / divisor
    torch.maximum(overflow, largest.isfinite().all().logical_not().to(overflow), out=overflow)


def any_overflow(overflows: Iterable[Tensor], device: torch.device = CPU) -> Tensor:
    """Joins the results of several devices: a float32 scalar tensor on the first.

    Args:
        overflows: float32 scalar tensors, 1 or 0.
        device: Where the result, 0, is if there are none.
    """
    # One that is given twice needs no operator.
    flags = list({id(flag): flag for flag in overflows}.values())
    joined = flags[0] if flags else scalar(0.0, device)
    for flag in flags[1:]:
        joined = torch.maximum(joined, flag.to(joined.device))
    return joined


def all_finite(
    gradients: Sequence[Tensor | None],
    scale: Tensor | float | None = None,
    powers_of_two: bool = True,
) -> Tensor:
    """Whether every element of every gradient is finite once it is unscaled; changes none.

    Args:
        gradients: Tensors of any dtype and layout (of sparse ones the values are looked at) or
            None (skipped).
        scale: The number to divide them by; None if they are unscaled already.
        powers_of_two: As for `unscaled`.

    Returns:
        A boolean scalar tensor.
    """
    if scale is not None:
        gradients = unscaled(gradients, scale, powers_of_two)
    parts = [p for gradient in gradients for p in real_parts(gradient) if p.numel()]
    if not parts:
        return scalar(True, CPU, torch.bool)
    device = parts[0].device
    if not torch.compiler.is_compiling():
        # A norm is one fast pass, and not finite if an element is not. But the norm of finite
        # elements can overflow too: then each element is checked.
        groups = of_tensors(map(widened, parts)).dense_groups
        norms = [norm.to(device) for group in groups for norm in torch._foreach_norm(group, 2.0)]
        fits = torch.stack([norm.float() for norm in norms]).isfinite().all()
        if bool(fits):
            return fits
    return torch.stack([part.isfinite().all().to(device) for part in parts]).all()


def have_graph(grads: Iterable[Tensor]) -> bool:
    """Whether a gradient is part of a graph."""
    with ranks.UNSEEN():
        return any(map(_REQUIRES_GRAD, grads))


# --- Of parameters ------------------------------------------------------------------------------


@torch.no_grad()
def multiply(info: ParameterInfo, multiplier: Multiplier) -> None:
    """Multiplies gradients by a scale."""
    unscale(info, multiplier.scale_on, checks=False, float16=True)
    # `DistributedDataParallel` takes them in the dtype of the parameter.
    _convert(info)


def _convert(info: ParameterInfo, dtype: torch.dtype | None = None) -> None:
    """Converts gradients of any dtype to one, or to those of their parameters."""
    found = [
        (p, g, dtype or p.dtype)
        for p in filter(ranks.is_widened, info.parameters)
        if (g := p.grad) is not None and g.dtype != (dtype or p.dtype) and not g.requires_grad
    ]
    made = converted([g for _, g, _ in found], [dtype for _, _, dtype in found])
    for (parameter, *_), gradient in zip(found, made, strict=True):
        parameter.grad = gradient


def converted(tensors: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    """Tensors without a graph in other dtypes, by one operator for many."""
    made = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=False)]
    round_into(list(zip(made, tensors, strict=True)))
    return made


def unscale(
    info: ParameterInfo,
    factor: Factor,
    *,
    divides: bool = False,
    checks: bool = True,
    recheck: bool = False,
    into: Tensor | None = None,
    float16: bool = False,
    sums: bool = True,
) -> dict[torch.device, Tensor]:
    """Unscales gradients, and checks each number; those that have a graph are replaced.

    Args:
        info: Their parameters.
        factor, recheck, into: As for `unscale_and_check_`.
        divides: Whether to divide by the factor.
        checks: Whether to check them.
        float16: Whether some may be in float16.
        sums: As for `collect`.

    Returns:
        By device, whether any number was infinite or NaN: float32 scalar tensor, 1 or 0. Empty if
        they are not checked.
    """
    grads = info.gradients()
    in_graph: list[tuple[Tensor, Tensor]] = []
    if have_graph(grads):
        in_graph = [
            (p, g) for p in info.parameters if (g := p.grad) is not None and g.requires_grad
        ]
        info = info.without({id(p) for p, _ in in_graph})
        grads = info.gradients()
    # It may raise.
    given = collect(info, grads, allow_float16=float16, sums=sums)
    for parameter, gradient in in_graph:
        number = factor(gradient.device)
        wide = torch.float32 if ranks.is_widened(parameter) else gradient.dtype
        with torch.enable_grad():
            gradient = gradient.to(wide)
            parameter.grad = gradient / number if divides else gradient * number
    if not checks:
        unscale_(given, factor, divide=divides)
        return {}
    by_device = unscale_and_check_(given, factor, divide=divides, recheck=recheck, into=into)
    if in_graph:
        finite = all_finite([p.grad for p, _ in in_graph])
        so_far = by_device.get(finite.device)
        bad = (~finite).to(torch.float32)
        by_device[finite.device] = bad if so_far is None else torch.maximum(so_far, bad)
    return by_device


# --- The result of a check ---------------------------------------------------------------------


def stamps(info: ParameterInfo) -> Stamps:
    """Values that change if a gradient is written to, or replaced by another tensor."""
    grads = info.gradients()
    with ranks.UNSEEN():
        return list(map(id, grads)), [gradient._version for gradient in grads]


class OverflowCheck(NamedTuple):
    """The result of checking unscaled gradients.

    Attributes:
        overflow: Whether one was infinite or NaN, here or in another wrapper that the same loss
            reached: float32 scalar tensor, 1 or 0.
        stamps: The stamps of all gradients then; None if nobody needs them.
        last: The last gradient; None if there was none.
        version: Its version.
    """

    overflow: Tensor
    stamps: Stamps | None
    last: Tensor | None
    version: int

    @classmethod
    def of(cls, overflow: Tensor, stamps: Stamps | None, info: ParameterInfo) -> OverflowCheck:
        """The result for the gradients that are there now."""
        # No weak reference, which would forbid `model.to` to swap the gradient for another one.
        last = info.last_gradient()
        return cls(overflow, stamps, last, 0 if last is None else last._version)

    def covers(self, info: ParameterInfo) -> bool:
        """Whether all gradients were checked and, as far as can be seen, stayed as they were."""
        # `.data` of a gradient hides what is done to it, and programs average that by hand.
        may_hide = not info.groups and ranks.has_others()
        return not may_hide and self.stamps == stamps(info)

    def is_gone(self, info: ParameterInfo) -> bool:
        """Whether the gradients that were checked have been cleared."""
        if self.last is None or not any(p.grad is self.last for p in reversed(info.parameters)):
            return True
        if self.version == self.last._version:
            return False
        # It was changed: to zeros, if gradients were cleared in place.
        return not any(part.any() for g in info.gradients() for part in real_parts(local(g)))

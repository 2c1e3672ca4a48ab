"""The gradients of a step, as dense tensors of real numbers that can be changed in place.

PyTorch's optimizers read `.grad`, as other code does between `backward` and `step`. So gradients
are unscaled in place: the values that can be read are those that are applied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from lossscale.errors import GradientsError
from lossscale.torch import ranks
from lossscale.torch.scaling import CPU

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")
_IS_NEGATED = torch.Tensor.is_neg
_DENSE = {torch.strided}
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_IN_PLACE = frozenset({torch.float32, torch.float64, torch.bfloat16})


class Gradients(NamedTuple):
    """The gradients of a step, and the dense tensors of real numbers that hold them.

    Attributes:
        grads: The gradients that are not None.
        dense_groups: The tensors that hold their numbers, by device and dtype, as kernels need
            them.
        owners: The gradient of each of these tensors.
    """

    grads: list[Any]
    dense_groups: list[list[Any]]
    owners: list[list[Any]]

    @property
    def device(self) -> Any:
        """The device of the first one; the CPU if there is none."""
        return self.dense_groups[0][0].device if self.dense_groups else CPU


def collect(info: ranks.ParameterInfo, *, allow_float16: bool = False) -> Gradients:
    """Returns the gradients of parameters, ready to be changed in place.

    A gradient that cannot be changed in place is replaced in `.grad`. So is a `Partial` one, by its
    sum, which the optimizer would compute and which must be checked.

    Args:
        info: The parameters, whose `.grad` may be None.
        allow_float16: Whether some may be in float16: to be checked, and not divided.

    Raises:
        GradientsError: If one is in float16, where dividing it would flush it to zero. Nothing was
            changed.
    """
    grads = [gradient for p in info.parameters if (gradient := p.grad) is not None]
    if info.is_due(len(grads)) and _shares_memory(grads):
        info.always_due = True
        grads = _each_its_own(info)
    if grads and len(info.devices) == 1 and _PLAIN_TYPES.issuperset(map(type, grads)):
        # One loop in C for each property: a loop over tuples takes twice the time.
        dtypes = set(map(_DTYPE, grads))
        plain = len(dtypes) == 1 and dtypes <= _IN_PLACE and set(map(_LAYOUT, grads)) == _DENSE
        if plain and not any(map(_IS_NEGATED, grads)):
            return Gradients(grads, [grads], [grads])
    owning = [p for p in info.parameters if p.grad is not None]
    if not allow_float16:
        for parameter in owning:
            _check_can_be_widened(parameter)
    pairs = [_dense(parameter, allow_float16) for parameter in owning]
    return _grouped(pairs)


def _shares_memory(grads: Sequence[Any]) -> bool:
    """Whether two gradients share memory, or one shares it with itself, as an expanded one does.

    Autograd gives the same gradient, or views of it, to each term of a sum.
    """
    places = []
    for each in grads:
        if type(each) is torch.Tensor and each.layout == torch.strided and each.numel():
            strides = zip(each.shape, each.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in strides) + 1
            if each.numel() > last:
                return True
            first = each.data_ptr()
            places.append((first, first + last * each.element_size()))
    places.sort()
    return any(end > start for (_, end), (start, _) in itertools.pairwise(places))


def _each_its_own(info: ranks.ParameterInfo) -> list[Any]:
    """Copies gradients that share memory, so that each is divided once."""
    for parameter in info.parameters:
        if parameter.grad is not None and type(parameter.grad) is torch.Tensor:
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
    return [p.grad for p in info.parameters if p.grad is not None]


def of_tensors(tensors: Iterable[Any]) -> Gradients:
    """Dense tensors of real numbers, which may be changed in place."""
    return _grouped([(tensor, tensor) for tensor in tensors])


def _grouped(pairs: Sequence[tuple[Any, Any]]) -> Gradients:
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for gradient, values in pairs:
        if values.is_floating_point() and values.numel():
            groups.setdefault((values.device, values.dtype), []).append((gradient, values))
    return Gradients(
        [gradient for gradient, _ in pairs],
        [[values for _, values in group] for group in groups.values()],
        [[gradient for gradient, _ in group] for group in groups.values()],
    )


def _dense(parameter: Any, allow_float16: bool) -> tuple[Any, Any]:
    """The gradient of a parameter, and the dense tensor of real numbers that it is stored in."""
    gradient = parameter.grad
    if gradient.dtype in ranks.HALF and not allow_float16:
        parameter.grad = gradient = gradient.to(parameter.dtype)
    if ranks.is_part_of_sum(gradient):
        parameter.grad = gradient = ranks.added_up(gradient, parameter)
    if gradient.layout == torch.sparse_coo and not gradient.is_coalesced():
        # Values with the same index are added, and their sum can overflow.
        parameter.grad = gradient = gradient.coalesce()
    if gradient.is_conj() or gradient.is_neg():
        # A lazy conjugate or negative cannot be changed in place.
        parameter.grad = gradient = gradient.resolve_conj().resolve_neg()
    values = ranks.local(gradient.detach())
    if values.layout != torch.strided:
        values = values._values() if values.layout == torch.sparse_coo else values.values()
    return gradient, torch.view_as_real(values) if values.is_complex() else values


def _check_can_be_widened(parameter: Any) -> None:
    if parameter.grad.dtype not in ranks.HALF:
        return
    if parameter.dtype == parameter.grad.dtype:
        raise GradientsError(
            f"Small unscaled gradients of dtype {parameter.dtype} would flush to zero. Received: "
            f"a parameter of shape {tuple(parameter.shape)}. Keep "
            "trained parameters in float32 (model.float()) and compute under torch.autocast("
            "device, torch.float16). Or wrap an optimizer of torch.optim with fused=True, which "
            "divides within its update, and leave unscale_() out."
        )
    if getattr(parameter, "grad_dtype", None) is not None:
        raise GradientsError(
            f"Small unscaled gradients of dtype {parameter.grad.dtype} would flush to zero. "
            f"Received: a parameter of shape {tuple(parameter.shape)} and dtype "
            f"{parameter.dtype}. Set `parameter.grad_dtype = None`."
        )

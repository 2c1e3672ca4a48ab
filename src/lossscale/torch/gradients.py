"""The gradients of parameters: what they are stored in, divided and looked at in place.

PyTorch's optimizers read `.grad`, and so does everybody else between `backward` and `step`. So a
gradient is divided where it is: what is read afterwards is what is applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from lossscale.errors import GradientsError
from lossscale.torch import ranks
from lossscale.torch.optimizer.scales import Factors
from lossscale.torch.private_names import check_and_unscale_

_layout, _dtype, _device = attrgetter("layout"), attrgetter("dtype"), attrgetter("device")
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_DENSE = {torch.strided}
_IN_PLACE = frozenset({torch.float32, torch.float64, torch.bfloat16})
_OF_THE_KERNEL = frozenset({torch.float32, torch.float64, torch.float16})
"""What the kernel takes on an accelerator, for certain."""


class Gradients:
    """The numbers of the gradients of a step, in dense tensors of real numbers.

    Attributes:
        given: The gradients, those that are None left out.
        groups: The tensors that hold their numbers. Off the processor those of a group have one
            device and one dtype: so the kernels want them.
        wholes: Of each of these tensors the gradient that it is, or that it is a part of.
    """

    def __init__(
        self, given: list[Any], groups: list[list[Any]], wholes: list[list[Any]] | None = None
    ) -> None:
        self.given = given
        self.groups = groups
        self.wholes = groups if wholes is None else wholes

    @property
    def device(self) -> Any:
        """Where the first of them is; the processor if there is none."""
        return self.groups[0][0].device if self.groups else torch.device("cpu")


def plain_gradients(parameters: Sequence[Any]) -> list[Any] | None:
    """Returns the gradients of parameters on one device; None if there are none, or unusual ones.

    All are dense tensors of real numbers, which one call of a kernel takes.
    """
    given = [gradient for p in parameters if (gradient := p.grad) is not None]
    # Each property is asked for in a loop of its own, in C: a tuple of them takes twice the time.
    dtypes = set(map(_dtype, given))
    if len(dtypes) == 1 and dtypes <= _IN_PLACE and set(map(_layout, given)) == _DENSE:
        return given if _PLAIN_TYPES.issuperset(map(type, given)) else None
    return None


def gradients_of(
    parameters: Sequence[Any], one_device: bool, *, allow_float16: bool = False
) -> Gradients:
    """Returns the gradients of parameters, ready to be changed in place.

    What cannot be changed where it is, is put into `.grad` anew. So is a gradient that is a part of
    a sum: the optimizer would add up the parts, and what their sum is nobody could tell before.

    Args:
        parameters: The parameters, with a `.grad` each, which may be None.
        one_device: Whether all of them are known to be on one device.
        allow_float16: Whether some may be in float16: to be looked at, and not divided.

    Raises:
        GradientsError: If one is in float16, where dividing it would flush it to zero. It is a
            `ValueError`. Nothing was changed.
    """
    given = [gradient for p in parameters if (gradient := p.grad) is not None]
    if not given:
        return Gradients(given, [])
    dtypes = set(map(_dtype, given))
    if dtypes <= _IN_PLACE and _PLAIN_TYPES.issuperset(map(type, given)):
        on_processor = given[0].device.type == "cpu"
        same = on_processor or len(dtypes) == 1
        same = same and set(map(_layout, given)) == _DENSE
        if same and (one_device or len(set(map(_device, given))) == 1):
            return Gradients(given, [given])
    return _grouped(_numbers(parameters, allow_float16))


def _numbers(parameters: Sequence[Any], allow_float16: bool) -> list[tuple[Any, Any]]:
    """The gradients, and the dense tensor of real numbers that each is stored in."""
    narrow = () if allow_float16 else (torch.float16, torch.complex32)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype in narrow:
            _check_can_be_widened(parameter)
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype in narrow:
            parameter.grad = gradient = gradient.to(parameter.dtype)
        if ranks.is_part_of_sum(gradient):
            parameter.grad = gradient = ranks.added_up(gradient, parameter)
        if gradient.layout == torch.sparse_coo and not gradient.is_coalesced():
            # The sum of values with one index can overflow where no value does, and has another
            # norm than they have.
            parameter.grad = gradient = gradient.coalesce()
        values = ranks.local(gradient.detach())
        if values.layout != torch.strided:
            values = values._values() if values.layout == torch.sparse_coo else values.values()
        if values.is_complex():
            if values.is_conj():
                # What is not stored cannot be changed in place.
                parameter.grad = gradient = gradient.resolve_conj()
                values = ranks.local(gradient.detach())
            values = torch.view_as_real(values)
        found.append((gradient, values))
    return found


def _check_can_be_widened(parameter: Any) -> None:
    if parameter.dtype == parameter.grad.dtype:
        raise GradientsError(
            f"A parameter of shape {tuple(parameter.shape)} is of {parameter.dtype}, and so is its "
            "gradient. Divided by the loss scale, small gradients would flush to zero in float16, "
            "and small updates would be lost. Keep the parameters that are trained in float32 "
            "(model.float()) and compute in float16 under torch.autocast(device, torch.float16)."
        )
    if getattr(parameter, "grad_dtype", None) is not None:
        raise GradientsError(
            f"A parameter of shape {tuple(parameter.shape)} of {parameter.dtype} has a gradient of "
            f"{parameter.grad.dtype}, where the unscaled gradient would flush to zero, and "
            "`parameter.grad_dtype` allows no other. Set `parameter.grad_dtype = None`."
        )


def _grouped(numbers: list[tuple[Any, Any]]) -> Gradients:
    groups: dict[Any, list[Any]] = {}
    wholes: dict[Any, list[Any]] = {}
    for gradient, tensor in numbers:
        if not (tensor.is_floating_point() and tensor.numel()):
            continue
        kind = tensor.device.type == "cpu" or tensor.dtype, tensor.device
        groups.setdefault(kind, []).append(tensor)
        wholes.setdefault(kind, []).append(gradient)
    given = [gradient for gradient, _ in numbers]
    return Gradients(given, list(groups.values()), list(wholes.values()))


def unscale_(gradients: Gradients, factors: Any, powers_of_two: bool) -> Any:
    """Divides gradients in place by the loss scale, and looks at each number.

    Args:
        gradients: The gradients.
        factors: Returns the `Factors` of a device.
        powers_of_two: Whether the scale is a power of two, so that multiplying by the reciprocal
            is exact. Others are divided by.

    Returns:
        Whether any number was infinite or NaN before: a float32 tensor of no dimensions on the
        device of the first gradient, 1 or 0. It is overwritten by the next call.
    """
    found = None
    for group in gradients.groups:
        here: Factors = factors(group[0].device)
        if found is None or here.found is not found:
            here.found.zero_()
        if powers_of_two:
            look_and_multiply_(group, here.found, here.reciprocal)
        else:
            torch._foreach_div_(group, here.scale)
            look_and_multiply_(group, here.found, torch.ones_like(here.scale))
        if found is None:
            found = here.found
        elif here.found is not found:
            torch.maximum(found, here.found.to(found.device), out=found)
    return found if found is not None else factors(gradients.device).found.zero_()


def sums_are_finite(group: list[Any]) -> bool:
    """Whether tensors are finite, as their sums say.

    A sum is infinite or NaN if an element is. Where it is so for another reason, this says nothing.
    """
    return math.isfinite(sum(tensor.sum(dtype=_wider(tensor.dtype)).item() for tensor in group))


def _wider(dtype: Any) -> Any:
    return torch.float32 if dtype == torch.bfloat16 else None


def look(gradients: Gradients, factors: Any) -> Any:
    """Whether any number of the gradients is infinite or NaN, as `unscale_` says it."""

    def ones(device: Any) -> Factors:
        here: Factors = factors(device)
        return here._replace(reciprocal=torch.ones_like(here.reciprocal))

    return unscale_(gradients, ones, True)


def multiply_(gradients: Gradients, factors: Any, powers_of_two: bool) -> None:
    """Divides gradients in place by the loss scale, and looks at none.

    Args:
        gradients: The gradients.
        factors: Returns the `Factors` of a device.
        powers_of_two: As for `unscale_`.
    """
    for group in gradients.groups:
        here = factors(group[0].device)
        if powers_of_two:
            torch._foreach_mul_(group, here.reciprocal)
        else:
            torch._foreach_div_(group, here.scale)


def look_and_multiply_(group: list[Any], found: Any, factor: Any) -> None:
    """Multiplies tensors in place, and sets `found` to 1 if any number was infinite or NaN.

    Args:
        group: Dense tensors on one device; off the processor, of one dtype.
        found: float32 tensor of no dimensions on their device.
        factor: The same.
    """
    if group[0].device.type == "cpu" or group[0].dtype in _OF_THE_KERNEL:
        check_and_unscale_(group, found, factor)
        return
    # The largest magnitude of finite numbers is finite, in any format.
    largest = torch.stack(torch._foreach_norm(group, float("inf")))
    torch.maximum(found, largest.isfinite().all().logical_not().to(found), out=found)
    torch._foreach_mul_(group, factor)

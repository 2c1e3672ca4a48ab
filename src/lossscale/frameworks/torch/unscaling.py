"""Unscaling the gradients of an optimizer where they are, and looking at each element once.

The kernel is the one behind `torch.amp.GradScaler`. It looks at a number before it divides, so a
scale below 1 can turn a finite number into an infinite one unseen; then it looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lossscale.errors import GradientsError
from lossscale.frameworks.torch.ranks import local

_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

_AS_THEY_ARE = (torch.float32, torch.float64)


def parts_of(parameters: Iterable[Any], *, allow_float16: bool = False) -> list[Any]:
    """The tensors of real numbers that the gradients of parameters are stored in.

    They share memory with `.grad`. A gradient whose memory cannot be changed in place (a sparse
    one of float16 with indices that recur, an expanded or a conjugated one) is replaced by a copy.

    Args:
        parameters: Tensors; those without a gradient are left out.
        allow_float16: Whether float16 gradients may be among them.

    Returns:
        Dense tensors of this process, of float dtypes; of sparse gradients the values, of complex
        ones the parts.

    Raises:
        GradientsError: If a gradient is float16 and must not be; nothing is changed then. It is a
            `ValueError`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        >>> weight.grad = torch.ones(2, dtype=torch.complex64)
        >>> [part.shape for part in parts_of([weight])]
        [torch.Size([2, 2])]
    """
    parameters = list(parameters)
    gradients = [g for parameter in parameters if (g := parameter.grad) is not None]
    kinds = {(type(g), g.dtype, g.layout) for g in gradients}
    if all(
        kind is torch.Tensor and dtype in _AS_THEY_ARE and layout == torch.strided
        for kind, dtype, layout in kinds
    ):
        return gradients
    if not allow_float16 and any(dtype == torch.float16 for _, dtype, _ in kinds):
        raise GradientsError(
            "Gradients of dtype float16 cannot be unscaled in place: small ones would flush to "
            "zero again, which is what the loss scale is there to prevent. They come from "
            "parameters of dtype float16. Keep trainable parameters in float32 and compute in "
            "float16 under torch.autocast."
        )
    return [_part(parameter) for parameter in parameters if parameter.grad is not None]


def _part(parameter: Any) -> Any:
    gradient = parameter.grad
    if gradient.dtype == torch.float16 and gradient.layout == torch.sparse_coo:
        # The sum of values with one index can overflow where no value did.
        gradient = parameter.grad = gradient.coalesce()
    if gradient.is_conj() or gradient.is_neg():
        gradient = parameter.grad = gradient.resolve_conj().resolve_neg()
    values = local(gradient)
    if values.layout != torch.strided:
        coo = values.layout == torch.sparse_coo
        values = values._values() if coo else values.values()
        if _shares_elements(values):
            gradient = parameter.grad = gradient.coalesce() if coo else gradient.clone()
            values = gradient._values() if coo else gradient.values()
    return torch.view_as_real(values) if values.is_complex() else values


def _shares_elements(values: Any) -> bool:
    """Whether an element of the memory is one of several elements of the tensor."""
    return any(
        step == 0 and size > 1 for size, step in zip(values.shape, values.stride(), strict=True)
    )


def unscale_(parts: Sequence[Any], found: Any, inverse: Any, *, look_again: bool) -> dict[Any, Any]:
    """Multiplies tensors by the reciprocal of the loss scale, in place, and looks for overflows.

    Args:
        parts: Dense tensors of float dtypes, on any devices.
        found: float32 scalar tensor; set to 1 if an element was infinite or NaN.
        inverse: float32 scalar tensor, the reciprocal of the loss scale.
        look_again: Whether to look at the unscaled numbers too, as a scale below 1 needs.

    Returns:
        For each device of the tensors a scalar like `found`; on its own device `found` itself.
    """
    by_device: dict[Any, Any] = {}
    for device, group in _groups(parts):
        if device not in by_device:
            by_device[device] = found if device == found.device else found.to(device)
        factor = inverse.to(device)
        _check_and_unscale_(group, by_device[device], factor)
        if look_again:
            _check_and_unscale_(group, by_device[device], torch.ones_like(factor))
    return by_device


def _groups(parts: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """The tensors as the kernel takes them: of one device, and there of one dtype.

    On the processor it takes all dtypes at once.
    """
    kinds = {(part.device, part.dtype) for part in parts}
    if len(kinds) == 1:
        return [(next(iter(kinds))[0], list(parts))]
    groups: dict[tuple[Any, Any], list[Any]] = {}
    for part in parts:
        device = part.device
        groups.setdefault((device, device.type != "cpu" and part.dtype), []).append(part)
    return [(device, group) for (device, _), group in groups.items()]


def multiply_(parts: Sequence[Any], factor: Any) -> None:
    """Multiplies tensors in place without looking at them.

    Args:
        parts: Dense tensors of float dtypes, on any devices.
        factor: float32 scalar tensor.
    """
    for device, group in _groups(parts):
        torch._foreach_mul_(group, factor.to(device))

"""Checks and unscales gradients in one pass over memory.

The kernel is the one behind `torch.amp.GradScaler`. It checks each number, then multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lossscale.torch.gradients import Gradients, of_tensors
from lossscale.torch.scaling import CPU, real_parts, scalar, unscaled, widened

_OF_THE_KERNEL = frozenset({torch.float32, torch.float64, torch.float16})
"""The dtypes that the kernel supports on every accelerator."""


def _in_two_passes(tensors: Sequence[Any], found: Any, factor: Any) -> None:
    for tensor in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(tensor).all()).to(found.dtype)))
        tensor.mul_(factor)


# Not documented, so that a release may have another name for it.
_kernel: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", _in_two_passes)


def unscale_and_check_(
    gradients: Gradients,
    factor: Callable[[Any], Any],
    *,
    divide: bool = False,
    recheck: bool = False,
    found: Any = None,
) -> dict[Any, Any]:
    """Checks each number of gradients, and unscales them in place.

    Args:
        gradients: The gradients.
        factor: Returns what they are multiplied by, on a device: float32 scalar tensor.
        divide: Whether they are divided by it instead: by a scale that is no power of two, whose
            reciprocal is not exact.
        recheck: Whether to check what comes out, too. A scale below 1 makes some infinite.
        found: A tensor to write into, for the device that it is on.

    Returns:
        By device, whether any number was infinite or NaN: float32 scalar tensor, 1 or 0. Empty if
        there was none to check.
    """
    by_device: dict[Any, Any] = {}
    for group in gradients.dense_groups:
        device = group[0].device
        if device not in by_device:
            own = found is not None and found.device == device
            zero = found if own else torch.zeros((), dtype=torch.float32, device=device)
            by_device[device] = zero
        multiplier = factor(device)
        if divide:
            torch._foreach_div_(group, multiplier)
            multiplier = scalar(1.0, device)
        _check_and_multiply_(group, by_device[device], multiplier)
        if recheck:
            _check_and_multiply_(group, by_device[device], scalar(1.0, device))
    return by_device


def check(gradients: Gradients, found: Any = None) -> dict[Any, Any]:
    """Checks gradients as `unscale_and_check_` does, and changes none."""
    return unscale_and_check_(gradients, lambda device: scalar(1.0, device), found=found)


def unscale_(gradients: Gradients, factor: Callable[[Any], Any], *, divide: bool = False) -> None:
    """Unscales gradients in place without a check, which takes less time."""
    for group in gradients.dense_groups:
        multiply = torch._foreach_div_ if divide else torch._foreach_mul_
        multiply(group, factor(group[0].device))


def _check_and_multiply_(group: list[Any], found: Any, factor: Any) -> None:
    if found.device.type == "cpu" or group[0].dtype in _OF_THE_KERNEL:
        _kernel(group, found, factor)
        return
    _check_largest(group, found, 1.0)
    torch._foreach_mul_(group, factor)


def check_quotients(gradients: Gradients, divisor: Callable[[Any], Any]) -> dict[Any, Any]:
    """Checks quotients of gradients that a kernel will divide; changes none, waits for no device.

    Args:
        gradients: The gradients.
        divisor: Returns on a device what they are divided by: float32 scalar tensor. Below 1 it
            makes infinities of finite numbers.

    Returns:
        As `unscale_and_check_`.
    """
    by_device: dict[Any, Any] = {}
    for group in gradients.dense_groups:
        device = group[0].device
        _check_largest(group, by_device.setdefault(device, scalar(0.0, device)), divisor(device))
    return by_device


def _check_largest(group: list[Any], found: Any, divisor: Any) -> None:
    # The largest magnitude of finite numbers is finite in any dtype.
    largest = widened(torch.stack(torch._foreach_norm(group, float("inf")))) / divisor
    torch.maximum(found, largest.isfinite().all().logical_not().to(found), out=found)


def any_overflow(by_device: dict[Any, Any], device: Any = CPU) -> Any:
    """Joins the results of all devices: float32 scalar tensor on the first, or on `device`."""
    found = list(by_device.values())
    for other in found[1:]:
        found[0] = torch.maximum(found[0], other.to(found[0].device))
    return found[0] if found else scalar(0.0, device)


def all_finite(gradients: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled; changes none.

    Args:
        gradients: Tensors of any dtype and layout (of sparse ones the values are looked at) or
            None (skipped).
        scale: What they will be divided by; None if they are unscaled already.
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

"""A step that the device takes back, for optimizers that cannot skip one by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from lossscale.errors import UnsupportedError
from lossscale.torch.ranks import local

_NUMBERS = (int, float)


class Saved:
    """What an optimizer is about to change: its parameters with a gradient, and their state.

    It takes the memory of these once more, for the time of the step.

    Args:
        optimizer: The optimizer. It has made its state already.
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        tensors, self._numbers = _held(optimizer)
        self._before = [torch.empty_like(tensor) for tensor in tensors]
        if tensors:
            torch._foreach_copy_(self._before, tensors)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def put_back(self, overflow: Any) -> None:
        """Puts all back if there was an overflow; the host does not learn of it.

        Args:
            overflow: float32 scalar tensor, 1 or 0.

        Raises:
            UnsupportedError: If the step has changed what the device cannot put back.
        """
        (now, numbers), skip = _held(self._optimizer), overflow != 0
        away = any(tensor.device != skip.device for tensor in now)
        if away or len(now) != len(self._before) or numbers != self._numbers:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} keeps on the host what changes in each "
                "step, and decide='device' cannot put that back. Make the optimizer with "
                "capturable=True if it has that, or leave `decide` out."
            )
        for tensor, before in zip(now, self._before, strict=True):
            torch.where(skip, before, tensor, out=tensor)


def _held(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The tensors that a step changes, and what else may be counted in numbers of Python."""
    tensors, numbers = [], []
    for group in optimizer.param_groups:
        numbers += [value for value in group.values() if type(value) in _NUMBERS]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            tensors.append(local(parameter))
            for value in optimizer.state.get(parameter, {}).values():
                nested = isinstance(value, (dict, list, tuple))
                for leaf in _pytree.tree_leaves(value) if nested else (value,):
                    if isinstance(leaf, torch.Tensor):
                        tensors.append(local(leaf))
                    elif type(leaf) in _NUMBERS:
                        numbers.append(leaf)
    return tensors, numbers

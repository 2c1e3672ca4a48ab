"""A step that the device takes back, for optimizers that cannot skip one by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from lossscale.errors import UnsupportedError
from lossscale.torch.ranks import local


class Saved:
    """What an optimizer is about to change: its parameters with a gradient, and their state.

    It takes the memory of these once more, for the time of the step.

    Args:
        optimizer: The optimizer. It has made its state already.
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._numbers = _numbers(optimizer)
        self._tensors = _tensors(optimizer)
        self._before = [torch.empty_like(tensor) for tensor in self._tensors]
        if self._tensors:
            torch._foreach_copy_(self._before, self._tensors)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def put_back(self, overflow: Any) -> None:
        """Puts all back if there was an overflow; the host does not learn of it.

        Args:
            overflow: float32 scalar tensor, 1 or 0.

        Raises:
            UnsupportedError: If the step has changed what the device cannot put back. Then nothing
                is changed.
        """
        now, skip = _tensors(self._optimizer), overflow != 0
        changed = {name for place, name, value in self._numbers if place.get(name) != value}
        changed |= {"step"} if any(tensor.device != skip.device for tensor in now) else set()
        if not changed and len(now) == len(self._before):
            for tensor, before in zip(now, self._before, strict=True):
                torch.where(skip, before, tensor, out=tensor)
            return
        for place, name, value in self._numbers:
            place[name] = value
        for tensor, before in zip(self._tensors, self._before, strict=True):
            tensor.copy_(before)
        raise UnsupportedError(
            f"{type(self._optimizer).__name__} keeps on the host what changes in each step "
            f"({', '.join(sorted(changed)) or 'a state that grows'}), and decide='device' cannot "
            "put that back. Make the optimizer with capturable=True if it has that, or leave "
            "`decide` out."
        )


def _with_gradient(optimizer: Any) -> list[Any]:
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]


def _tensors(optimizer: Any) -> list[Any]:
    """The tensors that a step changes."""
    tensors = []
    for parameter in _with_gradient(optimizer):
        tensors.append(local(parameter))
        for value in optimizer.state.get(parameter, {}).values():
            nested = isinstance(value, (dict, list, tuple))
            leaves = _pytree.tree_leaves(value) if nested else (value,)
            tensors += [local(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors


def _numbers(optimizer: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """The Python numbers that a step may count in: where each is, its name, and its value."""
    states = [optimizer.state.get(parameter, {}) for parameter in _with_gradient(optimizer)]
    return [
        (place, name, value)
        for place in (*optimizer.param_groups, *states)
        for name, value in place.items()
        if type(value) in (int, float)
    ]

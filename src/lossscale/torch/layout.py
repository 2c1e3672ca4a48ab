"""What is known of a list of parameters, until it is another list."""

from __future__ import annotations

from typing import Any

import torch

from lossscale.common.sizes import SMALL
from lossscale.torch import ranks

_NARROW = (torch.float16, torch.complex32)


class Layout:
    """Where the parameters of an optimizer are, and who has to agree on a step of theirs.

    Args:
        groups: The parameter groups.
        process_group: As `ranks.groups_of` takes it.
    """

    def __init__(self, groups: list[dict[str, Any]], process_group: Any) -> None:
        self._is_given = process_group is not None
        self._copies: dict[Any, int] = {}
        self._lists = [group["params"] for group in groups]
        self._lengths = [len(parameters) for parameters in self._lists]
        parameters = [p for listed in self._lists for p in listed]
        self.devices = list(dict.fromkeys(p.device for p in parameters))
        """Where they were when this was made."""
        self.one_device = len(self.devices) == 1
        self.one_place = self.one_device and not any(p.dtype in _NARROW for p in parameters)
        """Whether, besides, none of them is of a format that gradients cannot be divided in."""
        elements = sum(p.numel() for p in parameters)
        self.are_large = elements >= SMALL * max(len(parameters), 1)
        """Whether most of the work on them is reading and writing memory."""
        self.ranks = ranks.groups_of(parameters, process_group)
        """The process groups that have to agree."""
        self.started: set[int] = set()
        """The ids of parameters that the optimizer has all of its state for."""

    def copies(self, gradient: Any) -> int:
        """How many times a sum over `ranks` would count each number of a gradient."""
        # Most gradients of a model have one layout, and a mesh is slow to ask.
        spread = getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None)
        if spread not in self._copies:
            self._copies[spread] = ranks.copies(gradient, self.ranks, given=self._is_given)
        return self._copies[spread]

    def parameters(self, groups: list[dict[str, Any]]) -> list[Any] | None:
        """Returns the parameters of the groups; None if this is not their layout any more."""
        lists = [group["params"] for group in groups]
        if len(lists) != len(self._lists):
            return None
        for now, then, length in zip(lists, self._lists, self._lengths, strict=True):
            if now is not then or len(now) != length:
                return None
        parameters: list[Any] = lists[0] if len(lists) == 1 else [p for ps in lists for p in ps]
        # `model.to` moves parameters where they are, all at once.
        moved = parameters and parameters[0].device != self.devices[0]
        return None if moved else parameters

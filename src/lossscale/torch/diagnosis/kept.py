"""A model, a batch and the states of random numbers, as they were: put back after every run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DICTIONARIES = ("_parameters", "_buffers", "_modules")


class KeptModel:
    """What a run may change of a model, to be put back.

    Parameters are kept as well: `torch.nn.Embedding(max_norm=...)` is one that writes to its own on
    the way forward.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._attributes = [
            (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in _DICTIONARIES})
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def put_back(self) -> None:
        """Makes the model what it was: tensors, flags, and what else its modules hold."""
        for module, attributes, dictionaries in self._attributes:
            now = vars(module)
            now.clear()
            now.update(attributes)
            for name, entries in dictionaries.items():
                now[name].clear()
                now[name].update(entries)
        with torch.no_grad():
            for tensor, value in self._tensors:
                # Writing more than needed would spoil graphs that hold a parameter. Not by version
                # numbers: a batch normalization writes to its statistics behind them.
                if not _same_bits(tensor, value):
                    tensor.copy_(value)


def _same_bits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    integer = _INTEGERS.get(tensor.dtype.itemsize)
    if integer is None or tensor.layout != torch.strided:
        return False
    return bool(torch.equal(tensor.detach().view(integer), value.view(integer)))


@contextlib.contextmanager
def same_random_numbers(devices: set[torch.device]) -> Iterator[None]:
    """Within it random numbers are drawn from copies of the states, which stay as they were.

    Args:
        devices: Those of the model.
    """
    others = {device for device in devices if device.type != "cpu"}
    kind = next(iter(others)).type if others else "cuda"
    indices = sorted({device.index or 0 for device in others})
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(indices, device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def copied(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns a batch whose tensors may be written to.

    Args:
        batch: Tensors in dictionaries, lists and tuples; what else there is stays as it is.
        dtype: What narrower floating-point tensors are widened to; None for nothing.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        if dtype is not None and is_narrower(made, dtype):
            made = made.to(dtype)
        return made.requires_grad_(tensor.requires_grad)

    return mapped(copy, batch)


def is_narrower(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor holds floating-point numbers of fewer bits than a dtype has."""
    return bool(tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize)


def mapped(function: Callable[[torch.Tensor], Any], structure: Any) -> Any:
    """Applies a function to the tensors in dictionaries, lists and tuples.

    Classes of dictionaries that cannot be made from one are left as they are.
    """
    if isinstance(structure, torch.Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        found = {key: mapped(function, value) for key, value in structure.items()}
        if type(structure) is dict:
            return found
        try:
            made = type(structure)(found)  # type: ignore[call-arg]
        except Exception:
            return structure
        return made
    if isinstance(structure, (list, tuple)):
        parts = [mapped(function, value) for value in structure]
        if hasattr(structure, "_fields"):
            return type(structure)(*parts)
        return tuple(parts) if isinstance(structure, tuple) else parts
    return structure


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Returns the tensors in dictionaries, lists and tuples."""
    found: list[torch.Tensor] = []
    mapped(found.append, structure)
    return found

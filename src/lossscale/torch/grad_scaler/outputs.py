"""Losses as a training loop hands them over: one tensor, or a nest of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lossscale.errors import ScalerArgumentError
from lossscale.torch.scaling import scaled


def first_tensor(outputs: Any) -> Any:
    """The first tensor of a checked nest; None if it is empty."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    found = (first_tensor(value) for value in values)
    return next((tensor for tensor in found if tensor is not None), None)


def held(outputs: Any) -> Any:
    """Returns a nest that can be walked through more than once, checked.

    Args:
        outputs: A tensor, or a nest of dictionaries, sequences, named tuples and other iterables
            of tensors.

    Returns:
        The same; an iterable of another kind as an `_Once`, which is a list.

    Raises:
        ScalerArgumentError: If there is something else in it. It is a `ValueError`.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return {key: held(value) for key, value in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(held, outputs))
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(held, outputs))
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
        return _Once(map(held, outputs))
    raise ScalerArgumentError(
        "`outputs` must be a tensor, or a dictionary, sequence or other iterable of tensors: the "
        f"losses to scale. Received: {outputs!r} of type {type(outputs).__name__}."
    )


class _Once(list[Any]):
    """What was an iterable that is no sequence; it is handed back as an iterator."""


def scaled_nest(outputs: Any, scale: Any) -> Any:
    """Multiplies every tensor of a checked nest by the loss scale, in float32 or wider.

    Args:
        outputs: What `held` returned.
        scale: float32 scalar tensor.

    Example:
        >>> scaled_nest({"loss": torch.tensor(2.0, dtype=torch.float16)}, torch.tensor(65536.0))
        {'loss': tensor(131072.)}
    """
    if isinstance(outputs, torch.Tensor):
        return scaled(outputs, scale)
    if isinstance(outputs, dict):
        return {key: scaled_nest(value, scale) for key, value in outputs.items()}
    nest = (scaled_nest(value, scale) for value in outputs)
    if isinstance(outputs, _Once):
        return iter(list(nest))
    return type(outputs)(*nest) if hasattr(outputs, "_fields") else type(outputs)(nest)

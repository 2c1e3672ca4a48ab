"""PyTorch: gradients by tensors of its own, so that no parameter gets a `grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lossscale.diagnostics.measurement import Counted
from lossscale.frameworks.keras.backends.counting import Loss, wide_value
from lossscale.frameworks.torch import exponents as histograms


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Within it random numbers are drawn, also by data loaders, from a copy of the state."""
    context: contextlib.AbstractContextManager[None] = torch.random.fork_rng()
    return context


def counter(
    loss_of: Loss, variables: Sequence[Any], fixed: Sequence[Any]
) -> Callable[[Any], list[Counted]]:
    """Returns what takes a batch and counts the gradients of the loss on it.

    Args:
        loss_of: Computes the loss.
        variables: The trainable Keras variables.
        fixed: Not used: the other variables are read as they are.
    """
    del fixed

    def count(batch: Any) -> list[Counted]:
        tapped: list[tuple[str, Any]] = []

        def tap(name: str, tensor: Any) -> Any:
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
            tapped.append((name, tensor))
            return tensor

        with torch.enable_grad():
            # Detached they share their memory with the parameters, and are leaves of their own.
            values = [wide_value(variable).detach().requires_grad_() for variable in variables]
            loss = loss_of(list(zip(variables, values, strict=True)), batch, tap)
            sources: list[tuple[int | str, Any]] = [*enumerate(values), *tapped]
            gradients = torch.autograd.grad(
                loss, [tensor for _, tensor in sources], allow_unused=True
            )
        return [
            Counted(
                key,
                str(tensor.dtype).removeprefix("torch."),
                None if gradient is None else histograms.on_host(histograms.count_bins(gradient)),
            )
            for (key, tensor), gradient in zip(sources, gradients, strict=True)
        ]

    return count

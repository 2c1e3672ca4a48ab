"""PyTorch: gradients by tensors of its own, so that no parameter gets a `grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lossscale.diagnostics.exponents import ExponentTable
from lossscale.diagnostics.measurement import Derived
from lossscale.keras.backends.counting import Loss, value_of
from lossscale.torch import exponents as histograms


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Within it random numbers are drawn, also by data loaders, from a copy of the state."""
    context: contextlib.AbstractContextManager[None] = torch.random.fork_rng()
    return context


def differentiator(
    loss_of: Loss, variables: Sequence[Any], fixed: Sequence[Any], *, wide: bool, tapped: bool
) -> Callable[[Any, float], list[Derived]]:
    """Returns what takes a batch and a scale, and gives the gradients of the scaled loss.

    Args:
        loss_of: Computes the loss.
        variables: The trainable Keras variables.
        fixed: Not used: the other variables are read as they are.
        wide: Whether to widen the values of variables in 16 bits to float32.
        tapped: Whether to derive by the tensors that are tapped as well.
    """
    del fixed

    def derive(batch: Any, scale: float) -> list[Derived]:
        inside: list[tuple[str, Any]] = []

        def tap(name: str, tensor: Any) -> Any:
            if not tapped:
                return tensor
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
            inside.append((name, tensor))
            return tensor

        # Each run draws the same random numbers.
        with torch.random.fork_rng(), torch.enable_grad():
            # Detached they share their memory with the parameters, and are leaves of their own.
            values = [value_of(variable, wide).detach().requires_grad_() for variable in variables]
            loss = loss_of(list(zip(variables, values, strict=True)), batch, tap)
            sources: list[tuple[int | str, Any]] = [*enumerate(values), *inside]
            gradients = torch.autograd.grad(
                loss * scale, [tensor for _, tensor in sources], allow_unused=True
            )
        return [
            Derived(key, str(tensor.dtype).removeprefix("torch."), gradient, 0)
            for (key, tensor), gradient in zip(sources, gradients, strict=True)
        ]

    return derive


def count(gradient: Any) -> ExponentTable:
    """Returns the table of exponents of a gradient, on the host."""
    return histograms.on_host(histograms.count_bins(gradient))


def on_host(gradient: Any) -> Any:
    """Returns a gradient as a NumPy array."""
    return gradient.detach().cpu().numpy()

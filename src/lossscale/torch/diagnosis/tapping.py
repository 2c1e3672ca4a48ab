"""What the modules of a model return, and what the model returns: gradients by these tensors.

A hook on a tensor gets the gradient by it, as it is summed over all that it is used for. Nothing is
written into the model, and no gradient is kept: the exponents are counted at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lossscale.diagnostics.measurement import Derived
from lossscale.diagnostics.tapping import ACTIVATION, OUTPUT
from lossscale.torch.diagnosis.kept import mapped
from lossscale.torch.exponents import count_bins


class TappedModel:
    """Where to tap a model: every module without modules inside or with parameters of its own.

    Args:
        model: The model.
        name: What it is called.

    Attributes:
        name: The same.
        layer_names: The name of each tensor that was tapped to that of its module.
        untapped: Empty: no module hides what it returns.
    """

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self.name = name
        self.layer_names: dict[str, str] = {}
        self.untapped: tuple[str, ...] = ()
        self._modules = [(f"{OUTPUT}{name}", name, model)]
        for path, module in model.named_modules():
            own = any(True for _ in module.parameters(recurse=False))
            if module is not model and (own or not any(True for _ in module.children())):
                path = plain(path)
                self._modules.append((f"{ACTIVATION}{path}", path, module))

    @contextlib.contextmanager
    def installed(self) -> Iterator[list[Derived]]:
        """Within it gradients by the tensors are counted, into the list that it gives."""
        found: list[Derived] = []
        with contextlib.ExitStack() as stack:
            for key, layer, module in self._modules:
                hook = self._hook(key, layer, found)
                stack.callback(module.register_forward_hook(hook).remove)
            yield found

    def _hook(self, key: str, layer: str, found: list[Derived]) -> Any:
        def on_gradient(gradient: Any) -> None:
            dtype = str(gradient.dtype).removeprefix("torch.")
            found.append(Derived(key, dtype, count_bins(gradient), 0))

        def tapped(tensor: torch.Tensor) -> torch.Tensor:
            # A scalar is a loss already, whose gradient is that of nothing but the scale.
            if tensor.requires_grad and tensor.is_floating_point() and tensor.dim():
                self.layer_names[key] = layer
                if tensor._is_view():
                    # What is written into a view takes its hooks away.
                    tensor = tensor.clone()
                tensor.register_hook(on_gradient)
            return tensor

        def on_call(module: Any, given: Any, returned: Any) -> Any:
            return mapped(tapped, returned)

        return on_call


def plain(path: str) -> str:
    """Returns the name of a parameter or a module as it is without compiling the model."""
    return path.replace("_orig_mod.", "").removesuffix("._orig_mod")

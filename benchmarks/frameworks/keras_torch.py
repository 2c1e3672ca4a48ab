"""Keras 3 on PyTorch, eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from benchmarks.frameworks.floors import with_floors
from benchmarks.memory import peak_above_rest
from benchmarks.methods import Method
from benchmarks.workloads import Workload

PACKAGE = keras
MEMORY = "on a CPU the rise of resident memory during a step; on a GPU the allocator's peak"
GRAPH = "operations that reach the device in a step"


def versions() -> dict[str, str]:
    """The versions of what is measured."""
    return {"keras": keras.__version__, "torch": torch.__version__}


def devices() -> dict[str, str]:
    """The kinds of device there are, with the GPU's name."""
    if torch.cuda.is_available():
        return {"cpu": "", "gpu": torch.cuda.get_device_name()}
    return {"cpu": ""}


def on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """Within it tensors are made on a device of this kind."""
    # "cpu:0" would make copies of variables that are on "cpu", which get no gradients.
    return keras.device("cpu" if device == "cpu" else "gpu:0")


def forget() -> None:
    """Nothing holds on to programs that are gone."""


def optimizers(shell: str) -> Any:
    """The module of the inner optimizers."""
    return keras.optimizers


class Calls(TorchDispatchMode):
    """Counts the operations that reach a device, and the waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.host_syncs = 0
        self._copies = _CopiesToHost(self)

    def __enter__(self) -> Any:
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        # What item(), bool() and float() of a tensor come down to.
        self.host_syncs += func._schema.name == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


class _CopiesToHost(TorchFunctionMode):
    """Counts what waits for the device too, but is no operation if that is the CPU."""

    def __init__(self, counted: Calls) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counted.host_syncs += func in (torch.Tensor.tolist, torch.Tensor.numpy)
        return func(*args, **(kwargs or {}))


class _Eager:
    """A step that is run operation by operation."""

    traces = 0
    _device: Any

    def step(self) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """The inputs do not change."""

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def structure(self) -> dict[str, int]:
        self.prepare()
        with Calls() as counted:
            self.step()
        return {
            "graph_size": counted.calls,
            "memory_bytes": self._peak_memory(),
        }

    def _peak_memory(self) -> Any:
        self.prepare()
        self.wait()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            rest = torch.cuda.memory_allocated()
            self.step()
            self.wait()
            return torch.cuda.max_memory_allocated() - rest
        return peak_above_rest(self.step)


class Apply(_Eager):
    """`apply` on gradients that were computed before."""

    # As after a backward pass: an optimizer may unscale the variables' gradients in place.
    fresh_each_step = True

    def __init__(
        self,
        method: Method,
        workload: Workload,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
    ) -> None:
        self.variables = [keras.Variable(value) for value in workload.values()]
        self.optimizer = method.optimizer(new_inner, scale, keras)
        self.optimizer.build(self.variables)
        self.optimizer.scale_loss(1.0)
        self._device = self.variables[0].value.device
        factor = np.float32(scale if method.scaled else 1)
        self._given = [
            torch.as_tensor(g * factor, device=self._device) for g in workload.gradients()
        ]
        self.gradients = [torch.empty_like(given) for given in self._given]
        for variable, gradient in zip(self.variables, self.gradients, strict=True):
            variable.value.grad = gradient
        self._scale = torch.tensor(scale, device=self._device)
        self._method = method

    def prepare(self) -> None:
        torch._foreach_copy_(self.gradients, self._given)

    def step(self) -> None:
        with torch.no_grad():
            if self._method.reads:
                self._total = torch.stack([g.sum() for g in self.gradients]).sum()
            if self._method.unscales:
                torch._foreach_mul_(self.gradients, self._scale.reciprocal())
            self.optimizer.apply(self.gradients, self.variables)

    def parameters(self) -> list[Any]:
        return [v.value.detach().cpu().numpy().copy() for v in self.variables]


class Train(_Eager):
    """The train step of Keras' trainer."""

    fresh_each_step = False

    def __init__(
        self,
        method: Method,
        model_name: str,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
        small: bool,
    ) -> None:
        self._model = models.new_model(model_name, keras, small)
        optimizer = with_floors(method.optimizer(new_inner, scale, keras), method, scale)
        models.compile_without_scaling(self._model, keras, optimizer)
        self._device = self._model.trainable_variables[0].value.device
        self._data = tuple(
            torch.as_tensor(array, device=self._device) for array in models.batch(model_name, small)
        )
        self._model._symbolic_build(data_batch=self._data)
        self.first_parameters = self.parameters()

    def step(self) -> None:
        self._logs = self._model.train_step(self._data)

    def parameters(self) -> list[Any]:
        return [v.value.detach().cpu().numpy().copy() for v in self._model.trainable_variables]

"""Keras 3 on PyTorch, operation by operation.

Nothing is imported here that a process without Keras would not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from benchmarks.frameworks import Framework
from benchmarks.machine import peak_above_rest
from benchmarks.rows import Row
from benchmarks.timing import Program


class _Calls(TorchDispatchMode):
    """Counts the operations that reach a device."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Step(Program):
    """A step that is run operation by operation.

    Args:
        run: Called without arguments.
        tensors: What is trained.
        gradients: What is put into their `grad` before each step, as a backward pass does.
        shared: Whether other programs train the same, so that nobody may compare it.
    """

    def __init__(
        self, run: Callable[[], None], tensors: list[Any], gradients: Any = (), shared: bool = False
    ) -> None:
        self.step = run  # type: ignore[method-assign]
        self._tensors, self._gradients, self._shared = tensors, list(gradients), shared
        # An optimizer may unscale the gradients in place.
        self.fresh_each_step = bool(gradients)

    def prepare(self) -> None:
        if self._gradients:
            # In place, because optimizers and scalers may keep what they know of them.
            torch._foreach_copy_([tensor.grad for tensor in self._tensors], self._gradients)

    def wait(self) -> None:
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize()

    def timed(self, steps: int, clock: Callable[[], float]) -> float:
        if not self._tensors[0].is_cuda:
            return super().timed(steps, clock)
        # The device's own time, from the first kernel to the last.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def parameters(self) -> list[Any] | None:
        if self._shared:
            return None
        return [tensor.detach().cpu().numpy().copy() for tensor in self._tensors]

    def structure(self) -> dict[str, Any]:
        """The operations of a step, and the peak of memory.

        That is on a CPU the rise of resident memory, on a GPU the allocator's peak.
        """
        self.prepare()
        with _Calls() as counted:
            self.step()
        self.prepare()
        self.wait()
        if not self._tensors[0].is_cuda:
            return {"graph_size": counted.calls, "memory_bytes": peak_above_rest(self.step)}
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        self.step()
        self.wait()
        return {
            "graph_size": counted.calls,
            "memory_bytes": torch.cuda.max_memory_allocated() - rest,
        }


def _read(gradients: list[Any]) -> Any:
    return torch.stack([gradient.sum() for gradient in gradients]).sum()


def _unscale(gradients: list[Any], scale: Any) -> list[Any]:
    torch._foreach_mul_(gradients, scale.reciprocal())
    return gradients


def _alone(row: Row, name: str) -> Step:
    """`apply` on gradients that were computed before."""
    optimizer, variables = models.alone(row, name, _read, _unscale)
    tensors = [variable.value for variable in variables]
    given = [torch.as_tensor(g, device=tensors[0].device) for g in models.gradients(row, name)]
    gradients = [torch.empty_like(gradient) for gradient in given]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient

    def step() -> None:
        with torch.no_grad():
            optimizer.apply(gradients, variables)

    return Step(step, tensors, given)


def _training(row: Row, name: str, small: bool) -> Step:
    """The train step of Keras' trainer."""
    _, model, batch = models.training(row, name, small)
    tensors = [variable.value for variable in model.trainable_variables]
    data = tuple(torch.as_tensor(array, device=tensors[0].device) for array in batch)
    model._symbolic_build(data_batch=data)
    return Step(lambda: model.train_step(data), tensors)


def _program(row: Row, name: str, small: bool) -> Program:
    if row.case == "monitor":
        return models.Epoch(row, name, small)
    return _training(row, name, small) if row.model else _alone(row, name)


def devices() -> dict[str, str]:
    """Returns the kinds of device that PyTorch sees, with the GPU's name."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": "", **gpu}


def _on_device(kind: str) -> Any:
    import keras

    # "cpu:0" would make copies of variables that are on "cpu", which get no gradients.
    return keras.device("cpu" if kind == "cpu" else "gpu:0")


FRAMEWORK = Framework(_program, devices=devices, on_device=_on_device)

"""PyTorch's own optimizers as the conformance suite drives them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import lossscale
from conformance.harness import Harness, kind_of_device

DEVICE = os.environ.get("LOSSSCALE_TEST_DEVICE", "cpu")


def tensor(value: Any) -> Any:
    """Returns an array as a tensor on the device that is tested."""
    return torch.from_numpy(np.array(value)).to(DEVICE)


def inner_optimizers(fused: bool) -> dict[str, Callable[[Sequence[Any]], Any]]:
    """Returns what makes each optimizer of a list of parameters, by the suite's names."""
    flag: dict[str, Any] = {"fused": True} if fused else {}

    def sgd(rate: float, **settings: Any) -> Callable[[Sequence[Any]], Any]:
        return lambda parameters: torch.optim.SGD(parameters, lr=rate, **settings, **flag)

    return {
        "plain": sgd(1.0),
        "sgd": sgd(0.5),
        "momentum": sgd(0.5, momentum=0.9, nesterov=True),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, **flag),
        "small-rate": sgd(2.0**-13),
        "large-rate": sgd(8.0),
        "small-momentum": sgd(2.0**-13, momentum=0.5),
    }


class TorchNative(Harness):
    """PyTorch's optimizers, where the host decides whether to skip."""

    decide = "host"
    saves_last_step_skipped = False

    def __init__(self, values: Sequence[Any], inner: str, rule: Any = None) -> None:
        self.parameters_ = [torch.nn.Parameter(tensor(v)) for v in values]
        self.inner_optimizer = inner_optimizers(self.decide == "device")[inner](self.parameters_)
        self.scales_loss = rule is not None
        self.optimizer = self.inner_optimizer
        if rule is not None:
            self.optimizer = lossscale.torch.LossScaleOptimizer(
                self.inner_optimizer, rule=rule, decide=self.decide
            )

    @staticmethod
    def optimizers() -> Any:
        return torch.optim

    @classmethod
    def framework_wrapper(cls) -> Any:
        return lossscale.LossScaleOptimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        )

    def scale_loss(self, loss: Any) -> Any:
        return self.optimizer.scale_loss(tensor(loss)).cpu().numpy()

    def apply_nothing(self) -> None:
        self.step([None] * len(self.parameters_))

    def step(self, gradients: Sequence[Any]) -> None:
        one = tensor(np.float32(1))
        factor = self.optimizer.scale_loss(one) if self.scales_loss else one
        for parameter, gradient in zip(self.parameters_, gradients, strict=True):
            if gradient is None:
                parameter.grad = None
                continue
            given = tensor(gradient)
            if given.dtype != parameter.dtype:
                parameter.grad_dtype = None
            parameter.grad = given if self._scaled_already else given * factor
        self.optimizer.step()

    def parameters(self) -> list[Any]:
        return [parameter.detach().cpu().numpy().copy() for parameter in self.parameters_]

    def device(self) -> str:
        return kind_of_device(self.parameters_[0])

    def inner_state(self) -> list[Any]:
        saved = self.inner_optimizer.state_dict()
        kept = [
            np.array(torch.as_tensor(value).cpu())
            for state in saved["state"].values()
            for value in state.values()
            if value is not None
        ]
        return [*kept, *(np.array(group["lr"]) for group in saved["param_groups"])]

    def scale(self) -> Any:
        return self.optimizer.loss_scale.cpu().numpy()[()]

    def rule_state(self) -> Any:
        return self.optimizer._engine.scale.state

    def counters(self) -> tuple[int, int, bool, int]:
        optimizer = self.optimizer
        return (
            int(self.rule_state().good_steps),
            int(optimizer.steps_skipped),
            bool(optimizer.last_step_skipped),
            int(optimizer.iterations),
        )

    def set_scale(self, value: float) -> None:
        state = self.optimizer.state_dict()
        state["param_groups"][0]["loss_scale"] = value
        self.optimizer.load_state_dict(state)

    def become_a_copy(self) -> None:
        self.parameters_, self.optimizer = copy.deepcopy((self.parameters_, self.optimizer))
        self.inner_optimizer = self.optimizer.inner_optimizer

    def save(self, path: Any) -> None:
        torch.save((self.parameters_, self.optimizer.state_dict()), path)

    def load(self, path: Any) -> None:
        parameters, state = torch.load(path, weights_only=True, map_location=DEVICE)
        with torch.no_grad():
            for parameter, value in zip(self.parameters_, parameters, strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state)


class TorchNativeDevice(TorchNative):
    """Fused optimizers, which skip by themselves what the device has found."""

    decide = "device"


class _Loss(torch.autograd.Function):
    """A loss with given gradients, which are multiplied by what arrives, or are scaled already."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Any], scaled: bool, *parameters: Any) -> Any:
        ctx.given, ctx.scaled = given, scaled
        return torch.zeros((), device=DEVICE)

    @staticmethod
    def backward(ctx: Any, *seeds: Any) -> Any:
        (seed,) = (None,) if ctx.scaled else seeds
        found = [g if g is None or seed is None else g * seed for g in ctx.given]
        return (None, None, *found)


class TorchVerb(TorchNative):
    """The loop with `optimizer.backward(loss)`."""

    def step(self, gradients: Sequence[Any]) -> None:
        self.optimizer.zero_grad()
        given = [None if g is None else tensor(g) for g in gradients]
        for parameter, gradient in zip(self.parameters_, given, strict=True):
            if gradient is not None and gradient.dtype != parameter.dtype:
                parameter.grad_dtype = None
        loss = _Loss.apply(given, self._scaled_already, *self.parameters_)
        self.optimizer.backward(loss) if self.scales_loss else loss.backward()
        self.optimizer.step()


class TorchVerbDevice(TorchVerb):
    """The same with fused optimizers, where the device decides."""

    decide = "device"

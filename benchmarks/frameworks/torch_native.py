"""An AdamW of PyTorch alone, and with `lossscale.torch` or `torch.amp.GradScaler` around it.

All methods of a row have one list of parameters and one list of gradients, which are put back
before each step, and a state of their own. Times are processor time of one thread, on a GPU the
time between two CUDA events. A step scales a loss, steps the optimizer and moves the scale; the
backward pass is in the rows of whole steps only, which compute in float32: what loss scaling costs
does not depend on that, and float16 is slow on processors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lossscale
from benchmarks.frameworks import Framework
from benchmarks.frameworks.torch import Step, devices
from benchmarks.methods import SCALE
from benchmarks.rows import Row
from lossscale.torch.scaled_gradients import all_engines, register

CLIP = 1.0
FLAGS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
SCALERS = {"drop-in": lossscale.torch.GradScaler, "GradScaler": torch.amp.GradScaler}
SETTINGS: dict[str, dict[str, Any]] = {
    "wrapper": {},
    "device": {"decide": "device"},
    "fixed": {"rule": lossscale.FixedScale(SCALE)},
}


class _Step(Step):
    """A step of a program that has one wrapper: the others of a row are hidden."""

    def __init__(self, run: Callable[[], None], owner: Any, *arguments: Any) -> None:
        super().__init__(run, *arguments, shared=True)
        self._owner = owner

    def prepare(self) -> None:
        super().prepare()
        for each in all_engines():
            each._forget()
        engine = getattr(self._owner, "_engine", None)
        if engine is not None:
            engine._forget = register(engine, engine.info())


class _Filled(torch.autograd.Function):
    """A loss whose backward pass only puts given gradients in place."""

    @staticmethod
    def forward(ctx: Any, start: Any, fill: Callable[[], None]) -> Any:
        ctx.fill = fill
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.fill()
        return None, None


def _method(name: str, parameters: list[Any], row: Row) -> tuple[Any, ...]:
    """Returns an optimizer, what scales a loss, what comes after the backward pass, and a scaler.

    What scales a loss is None if the optimizer has `backward`. The scaler may be None.
    """
    # A rate that leaves the parameters where they are, which all methods share.
    inner = torch.optim.AdamW(parameters, lr=1e-12, weight_decay=0.0, **FLAGS[row.mode])
    way, _, clips = name.partition(", ")
    if way in SETTINGS:
        clip_norm = CLIP if clips else None
        ours = lossscale.torch.LossScaleOptimizer(inner, clip_norm=clip_norm, **SETTINGS[way])
        return ours, ours.scale_loss, ours.step, None
    if way in ("bare", "verb"):
        optimizer = lossscale.torch.LossScaleOptimizer(inner) if way == "verb" else inner

        def step() -> None:
            if clips:
                nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()

        return optimizer, None if way == "verb" else lambda loss: loss, step, None
    scaler: Any = SCALERS[way]("cpu" if row.device == "cpu" else "cuda", init_scale=SCALE)

    def step_and_update() -> None:
        if clips:
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(parameters, CLIP)
        scaler.step(inner)
        scaler.update()

    return inner, scaler.scale, step_and_update, scaler


@functools.lru_cache(maxsize=1)
def _shared(row: Row, small: bool) -> tuple[list[Any], Callable[[], Any]]:
    """Returns the parameters that all methods of a row train, and a loss."""
    torch.manual_seed(0)
    if row.workload is not None:
        parameters = [nn.Parameter(torch.tensor(value)) for value in row.workload.values()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        constant = torch.ones(())
        return parameters, lambda: constant
    if row.model.startswith("mlp"):
        width = 8 if small else 512
        hidden = (layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU()))
        layers = [nn.Linear(784, width), nn.ReLU(), *hidden, nn.Linear(width, 10)]
        x = torch.randn(128, 784)
    else:
        width = 4 if small else 32
        layers = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(width * 16, 10)]
        x = torch.randn(32, 3, 24, 24)
    model, labels = nn.Sequential(*layers), torch.randint(0, 10, (len(x),))
    return list(model.parameters()), lambda: nn.functional.cross_entropy(model(x), labels)


def _program(row: Row, name: str, small: bool) -> Step:
    parameters, loss = _shared(row, small)
    optimizer, scale, finish, scaler = _method(name, parameters, row)
    owner = optimizer if scaler is None else scaler

    def alone() -> None:
        scale(loss())
        finish()

    def derive(loss: Any) -> None:
        if scale is None:
            optimizer.backward(loss)
        else:
            scale(loss).backward()

    def whole() -> None:
        optimizer.zero_grad()
        for _ in range(4 if row.model.endswith("4 micro-batches") else 1):
            derive(loss())
        finish()

    start = torch.ones((), requires_grad=True)

    def backward() -> None:
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

        def fill() -> None:
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient

        derive(_Filled.apply(start, fill))
        finish()

    if row.workload is None:
        return _Step(whole, owner, parameters)
    factor = 1.0 if name.startswith("bare") else SCALE
    gradients = [torch.tensor(gradient) for gradient in row.workload.gradients(factor)]
    run = backward if row.case == "backward" else alone
    return _Step(run, owner, parameters, gradients)


FRAMEWORK = Framework(
    _program,
    start=lambda devices: torch.set_num_threads(1),
    devices=devices,
    # What is made without a device is made on that one.
    on_device=lambda kind: torch.device("cpu" if kind == "cpu" else "cuda"),
    forget=_shared.cache_clear,
)

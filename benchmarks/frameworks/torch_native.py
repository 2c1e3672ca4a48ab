"""An AdamW of PyTorch alone, and with `lossscale.torch` or `torch.amp.GradScaler` around it.

All methods of a row have one list of parameters and of gradients, which are put back before each
step, and a state of their own. Times are processor time of one thread, on a GPU between two CUDA
events. A step scales a loss, steps the optimizer and moves the scale; the backward pass is in the
rows of whole steps only. These compute in float32 on a processor, in float16 on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import lossscale
from benchmarks.frameworks import Framework
from benchmarks.frameworks.torch import Step, devices
from benchmarks.methods import SCALE
from benchmarks.rows import Row
from lossscale.torch import gradient_record

CLIP = 1.0
FLAGS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
NAMES = {"verb": "backward", "wrapper": "scale_loss", "GradScaler": "PyTorch's scaler"}

OURS = ("backward", "scale_loss", "device", "fixed")
SCALERS = ("drop-in", "PyTorch's scaler")
WAYS = ("bare", *OURS, *SCALERS)


@dataclasses.dataclass
class Way:
    """Optimizers, and what scales their losses.

    Args:
        name: One of `WAYS`.
        inners: PyTorch's optimizers.
        clip_norm: What gradients are clipped to, of each optimizer, or None.
        interval: The growth interval.
        scale: The first loss scale.
        device: The type of their device.
        settings: Further arguments of wrappers.
    """

    name: str
    inners: Sequence[Any]
    clip_norm: float | None = None
    interval: int = 2000
    scale: float = SCALE
    device: str = "cuda"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scaler, self.wrappers = None, list[Any]()
        if self.name in SCALERS:
            cls = lossscale.torch.GradScaler if self.name == "drop-in" else torch.amp.GradScaler
            self.scaler = cls(self.device, init_scale=self.scale, growth_interval=self.interval)
        elif self.name != "bare":
            dynamic = lossscale.DynamicScale(self.scale, growth_interval=self.interval)
            rule = lossscale.FixedScale(self.scale) if self.name == "fixed" else dynamic
            decide = "device" if self.name == "device" else "host"
            settings = {"rule": rule, "decide": decide, "clip_norm": self.clip_norm}
            self.wrappers = [
                lossscale.torch.LossScaleOptimizer(inner, **settings | self.settings)
                for inner in self.inners
            ]

    @property
    def optimizers(self) -> Sequence[Any]:
        """What a program steps."""
        return self.wrappers or self.inners

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)

    def scaled(self, loss: Any) -> Any:
        """The loss of which a program computes gradients."""
        if self.scaler is not None:
            return self.scaler.scale(loss)
        is_scaled = self.wrappers and self.name != "backward"
        return self.wrappers[0].scale_loss(loss) if is_scaled else loss

    def backward(self, loss: Any) -> None:
        """Computes gradients of a loss."""
        if self.name == "backward":
            self.wrappers[0].backward(loss)
        else:
            self.scaled(loss).backward()

    def step(self) -> None:
        """Steps all optimizers."""
        clipped = not self.clip_norm or any(each.clip_norm for each in self.wrappers)
        for inner in () if clipped else self.inners:
            if self.scaler is not None:
                self.scaler.unscale_(inner)
            parameters = [p for group in inner.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for each in self.optimizers:
            each.step() if self.scaler is None else self.scaler.step(each)
        if self.scaler is not None:
            self.scaler.update()

    def scales(self) -> list[float]:
        """The loss scales; waits for the device."""
        if self.scaler is not None:
            return [self.scaler.get_scale()]
        return [float(each.loss_scale) for each in self.wrappers]


class _Step(Step):
    """A step of a program that has one wrapper: the others of a row are hidden."""

    def __init__(self, run: Callable[[], None], owner: Any, *arguments: Any) -> None:
        super().__init__(run, *arguments, shared=True)
        self._owner = owner

    def prepare(self) -> None:
        super().prepare()
        for known in (gradient_record._records, gradient_record._owners, gradient_record._shared):
            known.clear()
        record = getattr(self._owner, "_record", None)
        if record is not None:
            gradient_record._records.add(record._reference)
            own = {each: {record._reference} for each in record.info.ids}
            gradient_record._owners.update(own)


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


def _way(name: str, parameters: list[Any], row: Row) -> Way:
    # A rate that leaves the parameters where they are, which all methods share.
    inner: torch.optim.Optimizer = torch.optim.AdamW(
        parameters, lr=1e-12, weight_decay=0.0, **FLAGS[row.mode]
    )
    way, _, clips = name.partition(", ")
    if way == "masters":
        inner, way = lossscale.torch.MasterWeights(inner), "bare"
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    # The verb leaves gradients that anything can clip.
    settings = {"clip_norm": None} if way == "verb" else {}
    device, clip_norm = parameters[0].device.type, CLIP if clips else None
    return Way(NAMES.get(way, way), [inner], clip_norm, device=device, settings=settings)


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
    elif row.model == "transformer":
        width = 8 if small else 512
        x = torch.randn(*((2, 16) if row.device == "cpu" else (32, 128)), width)
        layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0) for _ in range(6)]
        layers += [nn.Flatten(1), nn.Linear(x[0].numel(), 10)]
    else:
        width = 4 if small else 32
        layers = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(width * 16, 10)]
        x = torch.randn(32, 3, 24, 24)
    model, labels = nn.Sequential(*layers), torch.randint(0, 10, (len(x),))

    def loss() -> Any:
        with torch.autocast("cuda", torch.float16, enabled=row.device != "cpu"):
            return nn.functional.cross_entropy(model(x), labels)

    return list(model.parameters()), loss


def _program(row: Row, name: str, small: bool) -> Step:
    # Not while it runs: with a default device, each call of PyTorch takes longer.
    with torch.device("cpu" if row.device == "cpu" else "cuda"):
        return _built(row, name, small)


def _built(row: Row, name: str, small: bool) -> Step:
    parameters, loss = _shared(row, small)
    if name == "masters":
        parameters = [nn.Parameter(parameter.detach().half()) for parameter in parameters]
    way = _way(name, parameters, row)
    owner = way.scaler or way.optimizers[0]

    def alone() -> None:
        way.scaled(loss())
        way.step()

    def whole() -> None:
        way.zero_grad()
        for _ in range(4 if row.model.endswith("4 micro-batches") else 1):
            way.backward(loss())
        way.step()

    start = torch.ones((), requires_grad=True)

    def backward() -> None:
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

        def fill() -> None:
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient

        way.backward(_Filled.apply(start, fill))
        way.step()

    if row.workload is None:
        return _Step(whole, owner, parameters)
    factor = 1.0 if name.startswith(("bare", "masters")) else SCALE
    gradients = [torch.tensor(gradient) for gradient in row.workload.gradients(factor)]
    return _Step(backward if row.case == "backward" else alone, owner, parameters, gradients)


FRAMEWORK = Framework(
    _program, lambda: torch.set_num_threads(1), devices, forget=_shared.cache_clear
)

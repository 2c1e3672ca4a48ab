"""The ways to train that run on the simulated device beside PyTorch's own scaler."""

import dataclasses
from typing import Any

import torch

import lossscale
from lossscale import DynamicScale, FixedScale

SCALE = 8.0
OURS = ("backward", "scale_loss", "device", "clipped", "fixed")
SCALERS = ("drop-in", "PyTorch's scaler")
WAYS = ("bare", *OURS, *SCALERS)


@dataclasses.dataclass
class Way:
    """An optimizer and what scales its losses.

    Args:
        name: One of `WAYS`.
        inner: PyTorch's optimizer.
        settings: Settings of the wrapper, which replace those of the way.
    """

    name: str
    inner: Any
    settings: dataclasses.InitVar[dict[str, Any] | None] = None

    def __post_init__(self, settings):
        self.scaling = None
        if self.name in SCALERS:
            cls = lossscale.torch.GradScaler if self.name == "drop-in" else torch.amp.GradScaler
            self.scaling = cls("cuda", init_scale=SCALE, growth_interval=2)
        elif self.name != "bare":
            fixed = self.name == "fixed"
            chosen = {
                "rule": FixedScale(SCALE) if fixed else DynamicScale(SCALE, growth_interval=2)
            }
            if self.name == "device":
                chosen["decide"] = "device"
            if self.name == "clipped":
                chosen["clip_norm"] = 1.0
            chosen |= settings or {}
            self.scaling = lossscale.torch.LossScaleOptimizer(self.inner, **chosen)

    def scaled(self, loss):
        if self.name in SCALERS:
            return self.scaling.scale(loss)
        return loss if self.name in ("bare", "backward") else self.scaling.scale_loss(loss)

    def backward(self, loss):
        if self.name == "backward":
            self.scaling.backward(loss)
        else:
            self.scaled(loss).backward()

    def step(self):
        if self.name in SCALERS:
            self.scaling.step(self.inner)
            self.scaling.update()
        else:
            (self.scaling or self.inner).step()

    def scale(self):
        if self.scaling is None:
            return None
        get = getattr(self.scaling, "get_scale", None)
        return get() if get else float(self.scaling.loss_scale)

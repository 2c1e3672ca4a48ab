"""PyTorch: a training loop that was written for `torch.amp.GradScaler`, and rules of one's own."""

from typing import Any, NamedTuple, reveal_type

import torch

import lossscale
import lossscale.torch


class CountedState(NamedTuple):
    scale: Any
    steps: Any


class Halved(lossscale.ScaleRule):
    def init(self) -> CountedState:
        return CountedState(8.0, 0)

    def update(self, state: CountedState, finite: Any, *, xp: Any) -> CountedState:
        lowered = xp.where(state.scale > 1.0, state.scale * 0.5, state.scale)
        return CountedState(xp.where(finite, state.scale, lowered), state.steps + 1)

    def get_config(self) -> dict[str, Any]:
        return {}


class Slower(lossscale.DynamicScale):
    def update(self, state: lossscale.ScaleState, finite: Any, *, xp: Any) -> lossscale.ScaleState:
        return super().update(state, finite, xp=xp)


reveal_type(Slower().init())  # ScaleState
reveal_type(Halved().init())  # CountedState

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = lossscale.torch.GradScaler("cpu", init_scale=2.0**10)
drop_in: torch.amp.GradScaler = scaler
loss: torch.Tensor = model(torch.ones(4, 2)).mean()
reveal_type(scaler.scale(loss))  # Tensor
reveal_type(scaler.scale([loss]))  # list[Tensor]
scaler.scale(loss).backward()
reveal_type(scaler.unscale_(optimizer))  # None
reveal_type(scaler.step(optimizer))  # float | None
reveal_type(scaler.update())  # None
reveal_type(scaler.get_scale())  # float
reveal_type(scaler.is_enabled())  # bool
reveal_type(scaler.state_dict())  # dict[str, Any]
lossscale.torch.guard(torch.optim.lr_scheduler.StepLR(optimizer, 3), scaler)
own = lossscale.torch.LossScaleOptimizer(optimizer, rule=Halved())
lossscale.torch.guard(torch.optim.lr_scheduler.StepLR(optimizer, 3), own)

"""PyTorch: a training loop with the wrapper."""

from typing import reveal_type

import torch

import lossscale
import lossscale.torch

model = torch.nn.Linear(2, 1)
optimizer = lossscale.LossScaleOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0, decide="host"
)
reveal_type(optimizer)  # AroundTorch
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
optimizer.zero_grad()
loss: torch.Tensor = model(torch.ones(4, 2)).float().mean()
reveal_type(optimizer.scale_loss(loss))  # Tensor
reveal_type(optimizer.backward(loss))  # Tensor
reveal_type(optimizer.step())  # None


def closure() -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 2)).mean()
    optimizer.backward(loss)
    return loss


reveal_type(optimizer.step(closure))  # Tensor
reveal_type(optimizer.loss_scale)  # Tensor
reveal_type(optimizer.steps_skipped)  # int | Tensor
reveal_type(optimizer.last_step_skipped)  # bool | Tensor
reveal_type(optimizer.iterations)  # int | Tensor
reveal_type(optimizer.param_groups)  # list[dict[str, Any]]
reveal_type(optimizer.state_dict())  # dict[str, Any]
reveal_type(optimizer.clip_norm)  # float | None
reveal_type(optimizer.decide)  # Literal['host', 'device']
several = lossscale.LossScaleOptimizer([torch.optim.SGD(model.parameters(), lr=0.1)])
reveal_type(several.loss_scale)  # Tensor


class Logging(lossscale.torch.LossScaleOptimizer):
    def zero_grad(self, set_to_none: bool = True) -> None:
        print(float(self.loss_scale), int(self.steps_skipped))
        super().zero_grad(set_to_none)


logging = Logging(torch.optim.AdamW(model.parameters()), rule=lossscale.FixedScale(128.0))
reveal_type(logging.loss_scale)  # Tensor
logging.backward(model(torch.ones(4, 2)).mean())
reveal_type(logging.step())  # None


def report(of: lossscale.LossScaleOptimizer, plain: torch.optim.Optimizer) -> str:
    return f"{float(of.loss_scale)} {len(plain.param_groups)}"


print(report(optimizer, optimizer), float(logging.loss_scale))

batch = torch.ones(4, 2)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().mean()
    return loss


reveal_type(lossscale.torch.guard(schedule, optimizer))  # ExponentialLR
reveal_type(lossscale.torch.guard(model, optimizer))  # Linear
with lossscale.torch.Monitor(optimizer, model, every=10) as monitor:
    optimizer.backward(loss_of(model, batch))
    optimizer.step()
    record = monitor.step()
if record is not None:
    reveal_type(record.reason)  # SkipReason | None
    reveal_type(record.nonfinite)  # tuple[NonfiniteTensor, ...]
measured = lossscale.torch.diagnose(model, loss_of, [batch])
reveal_type(measured.verdict)  # Verdict
reveal_type(measured.rule)  # DynamicScale | None
reveal_type(lossscale.torch.explain(model, loss_of, batch).cause)  # Cause

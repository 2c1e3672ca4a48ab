"""PyTorch: a training loop that was written for `torch.amp.GradScaler`."""

from typing import reveal_type

import torch

import lossscale.torch

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

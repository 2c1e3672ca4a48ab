"""Trains in float16 with PyTorch alone. The second batch overflows and changes no parameter."""

import torch

import lossscale

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
model.to(device)

rule = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
adam = torch.optim.Adam(model.parameters(), lr=0.01)
# `clip_norm` applies to the gradients after they are divided by the scale.
optimizer = lossscale.LossScaleOptimizer(adam, rule=rule, clip_norm=1.0)
# A skipped step does not advance the schedule.
schedule = lossscale.torch.guard(torch.optim.lr_scheduler.ExponentialLR(adam, 0.9), optimizer)
x, y = torch.ones(2, 4, device=device), torch.zeros(2, 1, device=device)

trace = []
for batch in (x, x * 2**13, x, x):
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        prediction = model(batch)
    # float32 from here on: a mean over float16 numbers can overflow.
    loss = torch.nn.functional.mse_loss(prediction.float(), y)
    optimizer.scale_loss(loss).backward()
    optimizer.step()
    schedule.step()
    trace.append(float(optimizer.loss_scale))
    print(f"loss {loss.item():.5g}, next scale {trace[-1]:g}, rate {schedule.get_last_lr()[0]:.3g}")
print(*(f"{scale:g}" for scale in trace), "- steps skipped:", int(optimizer.steps_skipped))

"""GradCache: large contrastive batches in chunks, in float16."""

import torch

import lossscale

device = "cpu"
model = torch.nn.Linear(8, 4).to(device)
optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.Adam(model.parameters()))
chunks = torch.ones(6, 8, device=device).split(2)


def encode(chunk):
    with torch.autocast(device, torch.float16):
        return model(chunk).float()


with torch.no_grad():
    cache = torch.cat([encode(chunk) for chunk in chunks])
cache.requires_grad_()
cache.square().mean().backward()
for chunk, gradient in zip(chunks, cache.grad.split(2)):
    optimizer.backward(encode(chunk), gradient=gradient)
optimizer.step()
print(optimizer.steps_skipped)  # 0

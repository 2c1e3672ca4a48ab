"""A small model, gradients that are given, and what is left of a step."""

import copy

import torch

import lossscale


def parameters(*shapes, dtype=torch.float32):
    """Parameters with different values."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def wrapped(inner, **settings):
    return lossscale.torch.LossScaleOptimizer(inner, **settings)


def backward(optimizer, given, gradients, factor=1.0):
    """Backpropagates a loss that has these gradients; through the scale if there is one."""
    total = sum((p * (g * factor)).sum() for p, g in zip(given, gradients, strict=True))
    loss = optimizer.scale_loss(total) if hasattr(optimizer, "scale_loss") else total
    loss.backward()


def fill(optimizer, given, gradients):
    """Sets the gradients, multiplied by the scale if there is one, as they are."""
    scale = 1.0
    if hasattr(optimizer, "scale_loss"):
        scale = optimizer.scale_loss(torch.ones(()))
    for p, g in zip(given, gradients, strict=True):
        p.grad = None if g is None else (g * scale).to(p.dtype)


def bits(value):
    """Something that is equal only if each bit is."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            value = value.to_dense()
        value = value.detach().contiguous()
        stored = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        return value.dtype, tuple(value.shape), stored.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def snapshot(given, optimizer):
    """The bits of parameters and of the state of the optimizer inside."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bits([list(given), copy.deepcopy(inner.state_dict()["state"])])

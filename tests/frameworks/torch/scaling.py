"""What the tests of the gradient scaler share: a few weights, steps with chosen gradients."""

import torch

from lossscale.torch.grad_scaler import GradScaler

MAKERS = {"torch": torch.amp.GradScaler, "lossscale": GradScaler}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def parameters(count=2):
    return [torch.nn.Parameter(torch.full((3,), float(i + 1))) for i in range(count)]


def made(name="sgd", make=GradScaler, **settings):
    """A parameter, an optimizer of it, and a scaler."""
    weights = parameters(1)
    return weights, OPTIMIZERS[name](weights), make("cpu", **settings)


def one_step(scaler, optimizer, parameters, slope=1.0, *, unscale=False, update=True):
    """A step whose gradients are `slope` everywhere; returns what the step returned."""
    optimizer.zero_grad()
    scaler.scale(sum((p * slope).sum() for p in parameters)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    returned = scaler.step(optimizer)
    if update:
        scaler.update()
    return returned


def numbers(parameters):
    return [p.detach().tolist() for p in parameters]


def scale_and_tracker(scaler):
    return scaler.get_scale(), scaler._get_growth_tracker()

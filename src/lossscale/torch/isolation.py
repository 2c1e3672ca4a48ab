"""Runs a forward and a backward pass of a model, and restores it after them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from lossscale.common.monkeypatch import replace
from lossscale.common.random_states import kept_random_states


@contextlib.contextmanager
def as_it_was(model: Module) -> Iterator[None]:
    """Within it, a model trains uncompiled, with the same random numbers each time.

    After it, the model is unchanged, `.grad` included. Parameters are restored as well:
    `torch.nn.Embedding(max_norm=...)` writes to its own in the forward pass.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    dense = [g for _, g in gradients if g is not None and g.layout == torch.strided]
    written = *model.parameters(), *model.buffers(), *dense
    tensors = [(t, t.detach().clone()) for t in written]
    # A pass changes only the mode of scripted modules, whose other attributes are in C++.
    modes = [(module, module.training) for module in model.modules()]
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    dictionaries = [
        each for m in modules for each in (vars(m), m._parameters, m._buffers, m._modules)
    ]
    before = [dict(each) for each in dictionaries]
    devices = {tensor.device for tensor, _ in tensors if tensor.device.type != "cpu"}
    try:
        with (
            kept_random_states(),
            torch.random.fork_rng(
                sorted({device.index or 0 for device in devices}),
                device_type=next((device.type for device in devices), "cuda"),
            ),
            _eager_passes(model),
        ):
            if not model.training:
                model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for now, entries in zip(dictionaries, before, strict=True):
            now.clear()
            now.update(entries)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in tensors:
                # Write only what changed: a write spoils graphs that hold the parameter. Version
                # numbers do not help, because a batch normalization updates its statistics without
                # them.
                if not torch.equal(_bits(tensor), _bits(value)):
                    tensor.copy_(value)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _eager_passes(model: Module) -> Iterator[None]:
    """Within it, a model runs uncompiled, and its passes can be differentiated.

    Compiled modules call no hooks. The caller restores the attributes of the modules.
    """
    # Tensors of inference mode cannot be differentiated.
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        # Reentrant checkpointing would call `backward` within the backward pass, which
        # `torch.autograd.grad` refuses. The gradients are the same without it.
        called = staticmethod(lambda function, preserve, *args: function(*args))
        replace(stack, CheckpointFunction, "apply", called)
        stance = getattr(torch.compiler, "set_stance", None)
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        else:
            # PyTorch 2.4 and 2.5.
            for module in model.modules():
                vars(module)["_compiled_call_impl"] = None
                if "_orig_mod" in module._modules:
                    vars(module)["forward"] = module._modules["_orig_mod"]
        yield

"""Faults in a model with a transformer's, a U-Net's and a GRU's parts, and the right answers.

They were written before they were first run, thirty in three models; those stay whose kind neither
another one nor tests/broken_blocks.py has.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

NAN, INF = float("nan"), float("inf")


class Norm(nn.Module):
    eps = 1e-3

    def forward(self, x):
        return x / ((x * x).mean(-1, keepdim=True).sqrt() + self.eps)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("bias", torch.zeros(16, 16))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4 + self.bias.to(q.dtype)
        return scores.softmax(-1).to(v.dtype) @ v


class Through(nn.Module):
    function = staticmethod(lambda x: x)

    def forward(self, x):
        return self.function(x)


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.patch, self.batch_norm = nn.Conv2d(3, width, 4, 4), nn.BatchNorm2d(width)
        self.token, self.norm = nn.Parameter(torch.ones(width)), Norm()
        self.attention, self.gate = Attention(width), Through()
        self.gru, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 4)
        self.embed = nn.Embedding(9, width)

    def forward(self, image, tokens=None, weights=None):
        x = self.batch_norm(self.patch(image)).flatten(2).transpose(1, 2)
        x = self.gate(x + self.attention(self.norm(x * self.token.to(x.dtype))))
        x = x if tokens is None else x + self.embed(tokens)
        logits = self.head(self.gru(x)[0][:, -1])
        return logits if weights is None else logits * weights


class Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3e8


class DividedByZero(Amplify):
    @staticmethod
    def backward(ctx, gradient):
        return gradient / torch.zeros_like(gradient)


class Case(NamedTuple):
    """A fault, and the right answers.

    Attributes:
        causes: The causes that are right.
        operations: Words of the operation.
        module: The module; "" if none.
        change: Called with the model.
        given: Arguments besides or in place of the image.
        loss: The loss function.
        scale: The loss scale.
        words: Words of the text.
    """

    causes: str
    operations: str = ""
    module: str = ""
    change: Callable[[Any], Any] = lambda model: None
    given: Mapping[str, Any] = types.MappingProxyType({})
    loss: Callable[[Any], Any] = lambda y: functional.cross_entropy(y.float(), torch.arange(4))
    scale: float = 2.0**15
    words: str = ""


def set_to(path, value):
    """Sets a number of a parameter or buffer."""

    def change(model):
        dict([*model.named_parameters(), *model.named_buffers()])[path].data.view(-1)[3] = value
        if "running" in path:
            model.batch_norm.eval()

    return change


def with_gate(function):
    return lambda model: setattr(model.gate, "function", function)


def without_epsilon(model):
    model.norm.eps = 1e-8
    model.token.data.zero_()


def large_embeddings(model):
    model.embed.weight.data *= 1e6


CASES = {
    "a scale of 2**30": Case("scale", scale=2.0**30),
    "images of 1e7": Case(
        "forward overflow", "_to_copy", "patch", given={"image": torch.randn(4, 3, 16, 16) * 1e7}
    ),
    "a large weight": Case(
        "forward overflow",
        "_to_copy",
        "head",
        set_to("head.weight", 8.8e4),
        words="The parameter head.weight reaches 8.8e+04",
    ),
    "large weights of a convolution": Case(
        "forward overflow",
        "convolution",
        "patch",
        lambda model: model.patch.weight.data.abs_().mul_(5e5).clamp_(max=6e4),
    ),
    "large embeddings": Case(
        "forward overflow",
        "_to_copy",
        "gru",
        large_embeddings,
        {"tokens": torch.arange(16).expand(4, 16) % 9},
    ),
    "nothing and an epsilon of 1e-8": Case(
        "singular", "div", "norm", without_epsilon, words="epsilon 1e-08 is 0 in float16"
    ),
    "a row that is masked as a whole": Case(
        "singular", "softmax", "attention", lambda model: model.attention.bias[4].fill_(-INF)
    ),
    "a small number": Case(
        "singular", "reciprocal div", "gate", with_gate(lambda x: x * (1 / x.new_tensor(1e-9)))
    ),
    "a parameter": Case("weights", "", "token", set_to("token", NAN)),
    "statistics": Case(
        "weights", "", "batch_norm.running_var", set_to("batch_norm.running_var", NAN)
    ),
    "weights of the rows": Case("batch", "weights", given={"weights": torch.full((4, 1), NAN)}),
    "a backward pass that multiplies": Case(
        "scale", "Amplify", "gate", with_gate(Amplify.apply), scale=2.0**4
    ),
    "a backward pass by 0": Case(
        "singular, backward overflow", "DividedByZero", "gate", with_gate(DividedByZero.apply)
    ),
    "the logarithm of 0 in the loss": Case(
        "loss", loss=lambda y: -(y.float() * 1e4).softmax(-1).diag().log().sum()
    ),
    "a Dice loss of nothing": Case("loss", loss=lambda y: 1 - (y * 0).sum() / (y * 0).sum()),
    "infinite targets": Case("loss", loss=lambda y: (y.float() - INF).pow(2).mean()),
}


def program(name):
    """The model, the arguments of a batch, and the loss function of a case."""
    torch.manual_seed(0)
    model, case = Model(), CASES[name]
    case.change(model)
    return model, {"image": torch.randn(4, 3, 16, 16), **case.given}, case.loss


def mistakes(name, found):
    """What of an explanation is wrong; an empty list if nothing is."""
    case = CASES[name]
    words = case.operations.split()
    checks = {
        "cause": str(found.cause) in case.causes.split(", "),
        "operation": not words or any(word in found.operation for word in words),
        "module": not case.module or found.module == case.module,
        "text": case.words in found.text,
    }
    return [what for what, is_right in checks.items() if not is_right]

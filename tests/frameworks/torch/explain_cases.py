"""Faults in a vision transformer, a U-Net and a GRU with attention, and the right answers.

They were written before they were first run. In four of them nothing was skipped; these were
written again. One answer was wrong: what `relu` has cut off passes no NaN on.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """A fault: the architecture, the causes that are right, words of the operation, the module."""

    architecture: str
    causes: str
    operations: str
    module: str
    fault: Any
    scale: float = 2.0**15


CASES: dict[str, Case] = {}


def case(name, causes, operations, module, scale=2.0**15):
    def add(fault):
        CASES[name] = Case(name.partition(":")[0], causes, operations, module, fault, scale)
        return fault

    return add


# --- The vision transformer ----------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width, eps=1e-3):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        size = (x * x).mean(-1, keepdim=True).sqrt()
        return x / (size + self.eps) * self.weight.to(x.dtype)


class Gelu(nn.Module):
    cubes = False

    def forward(self, x):
        cube = x * x * x
        if self.cubes:
            return x * (cube / (1 + cube))
        return x * 0.5 * (1 + torch.tanh(0.8 * (x + 0.045 * cube)))


class SelfAttention(nn.Module):
    def __init__(self, width, tokens):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.zeros(tokens, tokens))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 6 + self.bias.to(q.dtype)
        return self.out(scores.softmax(-1).to(v.dtype) @ v)


class Layer(nn.Module):
    def __init__(self, width, tokens):
        super().__init__()
        self.norm1, self.attn = Norm(width), SelfAttention(width, tokens)
        self.norm2 = Norm(width)
        self.up, self.act, self.down = nn.Linear(width, 64), Gelu(), nn.Linear(64, width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        self.layers = nn.ModuleList(Layer(width, 17) for _ in range(2))
        self.norm, self.head = Norm(width), nn.Linear(width, 10)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        return logits / self.temperature.to(logits.dtype)


def vit():
    def loss(logits):
        return functional.cross_entropy(logits.float(), torch.arange(4))

    return VisionTransformer(), lambda: ((torch.randn(4, 3, 16, 16),), {}), loss


@case("vit: a scale of 2**30", "scale", "", "", 2.0**30)
def _(model, batch, loss):
    return model, batch, loss


@case("vit: images of 1e7", "forward overflow", "_to_copy", "patch")
def _(model, batch, loss):
    return model, lambda: ((batch()[0][0] * 1e7,), {}), loss


@case("vit: large weights of qkv", "forward overflow", "addmm mm", "layers.1.attn.qkv")
def _(model, batch, loss):
    model.layers[1].attn.qkv.weight.data *= 3e5
    return model, batch, loss


@case("vit: a black image and an epsilon of 1e-8", "singular", "div", "layers.0.norm1")
def _(model, batch, loss):
    model.layers[0].norm1.eps = 1e-8
    model.patch.bias.data.zero_()
    model.positions.data.zero_()
    return model, lambda: ((torch.zeros(4, 3, 16, 16),), {}), loss


@case("vit: NaN in the class token", "weights", "", "token")
def _(model, batch, loss):
    model.token.data[0, 0, 3] = NAN
    return model, batch, loss


@case("vit: inf in the last norm", "weights", "", "norm.weight")
def _(model, batch, loss):
    model.norm.weight.data[5] = INF
    return model, batch, loss


@case("vit: a cube in the activation", "forward overflow", "mul", "layers.1.act")
def _(model, batch, loss):
    model.layers[1].act.cubes = True
    model.layers[1].up.bias.data[7] = 60.0
    return model, batch, loss


@case("vit: a temperature that is 0 in float16", "singular", "div", "VisionTransformer")
def _(model, batch, loss):
    model.temperature.data.fill_(1e-8)
    return model, batch, loss


@case("vit: a row of the bias is masked as a whole", "singular", "softmax", "layers.0.attn")
def _(model, batch, loss):
    model.layers[0].attn.bias[4] = -INF
    return model, batch, loss


@case("vit: the logarithm of 0 in the loss", "loss", "", "")
def _(model, batch, loss):
    return (
        model,
        batch,
        lambda logits: -(logits.float() * 1e4).softmax(-1)[:, :4].diag().log().sum(),
    )


# --- The U-Net -----------------------------------------------------------------------------------


class Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3e6


class DividedByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / torch.zeros_like(gradient)


class Through(nn.Module):
    """Applies a function, or none."""

    function: Any = None

    def forward(self, x):
        return x if self.function is None else self.function(x)


class Convs(nn.Module):
    def __init__(self, given, made):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made)
        self.conv2 = nn.Conv2d(made, made, 3, padding=1)

    def forward(self, x):
        return functional.relu(self.conv2(functional.relu(self.norm1(self.conv1(x)))))


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.before = Through()
        self.gain = nn.Parameter(torch.ones(3, 1, 1))
        self.down, self.middle = Convs(3, width), Convs(width, 2 * width)
        self.gate = Through()
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.after = Through()
        self.decode, self.out = Convs(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, image, weights=None):
        first = self.down(self.before((image * self.gain).half()))
        middle = self.gate(self.middle(functional.max_pool2d(first, 2)))
        up = self.after(self.up(middle))
        logits = self.out(self.decode(torch.cat([first, up], 1)))
        return logits if weights is None else logits * weights.to(logits.dtype)


def unet():
    def loss(logits):
        target = (torch.arange(logits.numel()) % 2).float().reshape(logits.shape)
        return functional.binary_cross_entropy_with_logits(logits.float(), target)

    return UNet(), lambda: ((torch.randn(4, 3, 16, 16),), {}), loss


@case("unet: a scale of 2**30", "scale", "", "", 2.0**30)
def _(model, batch, loss):
    return model, batch, loss


@case("unet: large weights in the middle", "forward overflow", "convolution", "middle.conv2")
def _(model, batch, loss):
    model.middle.conv2.weight.data.abs_().mul_(3e4)
    return model, batch, loss


@case("unet: a sum over the image", "forward overflow", "sum", "gate")
def _(model, batch, loss):
    def gated(x):
        total = (x * 3e3).sum((2, 3), keepdim=True)
        return x * (total / (1 + total))

    model.gate.function = gated
    model.middle.conv2.bias.data.fill_(1.0)
    return model, batch, loss


@case("unet: a constant image and an epsilon of 1e-8", "singular", "div", "before")
def _(model, batch, loss):
    def standardized(x):
        centered = x - x.mean((1, 2, 3), keepdim=True)
        return centered / ((centered * centered).mean((1, 2, 3), keepdim=True).sqrt() + 1e-8)

    def with_a_constant_image():
        images = torch.randn(4, 3, 16, 16)
        images[2] = 0.5
        return (images,), {}

    model.before.function = standardized
    return model, with_a_constant_image, loss


@case("unet: edges of a constant image", "singular, backward overflow", "sqrt div", "before")
def _(model, batch, loss):
    def edges(x):
        dx, dy = x - x.roll(1, 2), x - x.roll(1, 3)
        return (dx * dx + dy * dy).sqrt() + x

    model.before.function = edges
    return model, lambda: ((torch.full((4, 3, 16, 16), 0.5),), {}), loss


@case("unet: NaN in the weights of the pixels", "batch", "weights", "")
def _(model, batch, loss):
    weights = torch.ones(4, 1, 16, 16)
    weights[1, 0, 3, 3] = NAN
    return model, lambda: (batch()[0], {"weights": weights}), loss


@case("unet: a Dice loss of nothing", "loss", "", "")
def _(model, batch, loss):
    def dice(logits):
        found, target = logits.float() * 0, torch.zeros(logits.shape)
        return 1 - 2 * (found * target).sum() / (found.sum() + target.sum())

    return model, batch, dice


@case("unet: statistics that are NaN", "weights", "", "down.norm1.running_var")
def _(model, batch, loss):
    model.down.norm1.running_var[2] = NAN
    model.down.norm1.eval()
    return model, batch, loss


@case("unet: a backward pass that multiplies by 3e6", "scale", "Amplify", "after")
def _(model, batch, loss):
    model.after.function = Amplify.apply
    return model, batch, loss


@case("unet: a backward pass by 0", "singular, backward overflow", "DividedByZero", "after")
def _(model, batch, loss):
    model.after.function = DividedByZero.apply
    return model, batch, loss


# --- The GRU with attention ----------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.factor = nn.Linear(width, width), 0.2

    def forward(self, states, lengths):
        scores = self.query(states[:, -1:]) @ states.transpose(1, 2) * self.factor
        places = torch.arange(states.shape[1])
        scores = scores.masked_fill(places >= lengths[:, None, None], -INF)
        return (scores.softmax(-1).to(states.dtype) @ states)[:, 0]


class Mean(nn.Module):
    def forward(self, states, lengths):
        inside = (torch.arange(states.shape[1]) < lengths[:, None])[..., None].to(states.dtype)
        return (states * inside).mean(1) / (lengths[:, None] / states.shape[1]).to(states.dtype)


class Tagger(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.attention, self.mean = Attention(width), Mean()
        self.weighting, self.finish = Through(), Through()
        self.head = nn.Linear(2 * width, 10)

    def forward(self, tokens, lengths):
        states, _ = self.gru(self.embed(tokens))
        states = self.weighting(states.half())
        both = torch.cat([self.attention(states, lengths), self.mean(states, lengths)], -1)
        return self.finish(self.head(both))


def gru():
    def batch():
        return (torch.randint(0, 50, (4, 9)), torch.tensor([9, 3, 5, 7])), {}

    return Tagger(), batch, lambda logits: functional.cross_entropy(logits.float(), torch.arange(4))


@case("gru: a scale of 2**30", "scale", "", "", 2.0**30)
def _(model, batch, loss):
    return model, batch, loss


@case("gru: large embeddings", "forward overflow", "_to_copy", "gru")
def _(model, batch, loss):
    model.embed.weight.data *= 1e6
    return model, batch, loss


@case("gru: large attention scores", "forward overflow", "mul", "attention")
def _(model, batch, loss):
    model.attention.factor = 1e7
    return model, batch, loss


@case("gru: attention over a sentence of length 0", "singular", "softmax", "attention")
def _(model, batch, loss):
    model.mean.forward = lambda states, lengths: states.mean(1)
    return model, lambda: ((batch()[0][0], torch.tensor([9, 3, 0, 7])), {}), loss


@case("gru: the mean of a sentence of length 0", "singular", "div", "mean")
def _(model, batch, loss):
    model.attention.forward = lambda states, lengths: states[:, -1]
    return model, lambda: ((batch()[0][0], torch.tensor([9, 3, 0, 7])), {}), loss


@case("gru: the logarithm of a probability of 0", "singular", "log", "finish")
def _(model, batch, loss):
    def log_probabilities(x):
        powers = torch.exp((x - x.amax(-1, keepdim=True)) * 200)
        return torch.log(powers / powers.sum(-1, keepdim=True))

    model.finish.function = log_probabilities
    return model, batch, loss


@case("gru: the reciprocal of a small frequency", "singular", "reciprocal div", "weighting")
def _(model, batch, loss):
    model.weighting.register_buffer("frequencies", torch.full((16,), 1e-9))
    model.weighting.function = lambda x: x * (1 / model.weighting.frequencies.to(x.dtype))
    return model, batch, loss


@case("gru: NaN in a row of the embeddings", "weights", "", "embed.weight")
def _(model, batch, loss):
    model.embed.weight.data[11, 3] = NAN
    return model, lambda: ((torch.full((4, 9), 11), batch()[0][1]), {}), loss


@case("gru: infinite targets", "loss", "", "")
def _(model, batch, loss):
    return model, batch, lambda logits: (logits.float() - INF).pow(2).mean()


@case("gru: a power that is too large", "forward overflow", "exp", "finish")
def _(model, batch, loss):
    model.finish.function = lambda x: torch.exp(x * 10 + 12)
    return model, batch, loss


ARCHITECTURES = {"vit": vit, "unet": unet, "gru": gru}


def program(name):
    """The model, a batch and the loss function of a case."""
    torch.manual_seed(0)
    found = CASES[name]
    model, batch, loss = found.fault(*ARCHITECTURES[found.architecture]())
    return model, batch(), loss


def judged(name, explanation):
    """Whether the cause, the operation and the module of an explanation are right."""
    found = CASES[name]
    is_right = str(explanation.cause) in found.causes.split(", ")
    words = found.operations.split()
    has_operation = not words or any(word in explanation.operation for word in words)
    return is_right, has_operation, not found.module or explanation.module == found.module

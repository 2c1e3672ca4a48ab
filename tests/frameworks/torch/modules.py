"""Small models of many kinds, each with a loss on a batch that float16 loses something of."""

import contextlib
import functools

import torch
from torch import nn

LOSES = 2.0**-17
"""What a loss is multiplied by, as a mean over so many more outputs would."""


class Through(nn.Module):
    """A layer, and how it is called."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


class Casting(nn.Module):
    """Computes in float16 whatever it is told to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 2)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return (x.half() @ self.weight.half()).to(x.dtype)


class OwnAutocast(nn.Module):
    """Switches automatic casting on by itself, and off for a part."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.second(x.to(self.second.weight.dtype))


def _frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].weight.requires_grad_(False)
    return model


def _embedded(**settings):
    return nn.Sequential(nn.Embedding(9, 6, **settings), nn.Linear(6, 4))


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "embedding": _embedded,
    "sparse embedding": lambda: _embedded(sparse=True),
    "embedding that writes": lambda: _embedded(max_norm=0.5),
    "lstm": lambda: Through(nn.LSTM(6, 5, batch_first=True), lambda layer, x: layer(x)[0][:, -1]),
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
    "batch norm": lambda: nn.Sequential(
        nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Flatten(), nn.Linear(24, 2)
    ),
    "attention": lambda: Through(
        nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    ),
    "frozen": _frozen,
    "casts by itself": Casting,
    "own autocast": OwnAutocast,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
}


def model_of(kind):
    torch.manual_seed(1)
    return MODELS[kind]()


def batches_of(kind, count=2):
    """Batches for a model, each alike but for the numbers in it."""
    made = torch.Generator().manual_seed(2)
    if "embedding" in kind:
        # Tokens that recur.
        return [torch.randint(0, 5, (3, 4), generator=made) for _ in range(count)]
    return [torch.randn(3, 4, 6, generator=made) for _ in range(count)]


def loss_fn(model, batch):
    """Small enough that float16 loses a part of the gradients, and not all of them."""
    found = model(batch)
    return (found.to(torch.promote_types(found.dtype, torch.float32)) ** 2).mean() * LOSES


@functools.cache
def _onednn_has_float16_lstm():
    with torch.random.fork_rng(), torch.autocast("cpu", torch.float16):
        try:
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError:
            return False
    return True


def kernels_of(kind):
    """Within it a model of the kind runs in float16 on this processor."""
    if kind == "lstm" and not _onednn_has_float16_lstm():
        return torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
    return contextlib.nullcontext()

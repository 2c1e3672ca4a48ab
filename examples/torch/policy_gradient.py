"""Trains a transformer by policy gradients; the same float16 model samples, token by token.

The importance ratio divides a sequence's probability in training by its probability when it was
sampled. Without rounding it is 1 before the step. The first lines show how far off it is in other
precisions, and when a copy of the model samples.
"""

import copy

import torch
from torch.nn.functional import scaled_dot_product_attention

import lossscale

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 32, 32, 4, 2, 64
device = "cuda" if torch.cuda.is_available() else "cpu"


def attention(q, k, v):
    """Causal attention of the last rows; the same sums for one row and for all of them."""
    rows, columns = q.shape[2], k.shape[2]
    later = torch.ones(rows, columns, dtype=torch.bool, device=device).triu(columns - rows + 1)
    scores = (q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5).masked_fill(later, -float("inf"))
    return scores.softmax(-1, torch.float32).to(v.dtype) @ v


def other_attention(q, k, v):
    """The same, as PyTorch computes it for whole sequences."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        layers = (
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )
        self.mlp = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), *layers)

    def forward(self, x, cache, attend):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*cache))
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.place = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, start=0, caches=(None,) * LAYERS, attend=attention):
        places = torch.arange(start, start + tokens.shape[1], device=device)
        x = self.token(tokens) + self.place(places)
        for block, cache in zip(self.blocks, caches):
            x = block(x, cache, attend)
        return torch.distributions.Categorical(logits=self.head(x).float())


@torch.no_grad()
def sample(policy, count):
    """Returns sequences, and the logarithm of each token's probability."""
    tokens = torch.randint(VOCABULARY, (count, 1), device=device)
    caches, logs = [[] for _ in range(LAYERS)], []
    for place in range(LENGTH - 1):
        distribution = policy(tokens[:, -1:], place, caches)
        new = distribution.sample()
        logs.append(distribution.log_prob(new))
        tokens = torch.cat([tokens, new], 1)
    return tokens, torch.cat(logs, 1)


def logs_of(policy, tokens, attend=attention):
    """Returns the logarithm of each token's probability, as training computes it."""
    return policy(tokens[:, :-1], attend=attend).log_prob(tokens[:, 1:])


def off(logs, sampled):
    """Returns how far the importance ratio of any sequence is from 1."""
    return float(((logs - sampled).sum(1).exp() - 1).abs().max())


@torch.no_grad()
def table():
    """Returns a table in Markdown: `off` for 256 sequences of a policy that prefers some tokens."""
    torch.manual_seed(0)
    policy = Policy().to(device)
    for weight in policy.parameters():
        weight.mul_(2 if weight.ndim > 1 else 1)
    columns = []
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(policy).to(dtype)
        tokens, sampled = sample(model, 256)
        with torch.autocast(device, dtype):
            logs = logs_of(policy, tokens)
        logs = logs, logs_of(model, tokens), logs_of(model, tokens, other_attention)
        columns.append([f"{off(each, sampled):.1%}" for each in logs])
    names = (
        "float32 parameters under `autocast` train, a rounded copy samples",
        "one model trains and samples",
        "the same, with another attention kernel in training",
    )
    rows = [f"| {name} | {' | '.join(cells)} |" for name, *cells in zip(names, *columns)]
    return "\n".join(["| | bfloat16 | float16 |", "|---|---|---|", *rows])


def train(steps=28):
    """Rewards each token that is 1 to 4 above the one before it."""
    torch.manual_seed(0)
    policy = Policy().half().to(device)
    inner = lossscale.torch.MasterWeights(torch.optim.AdamW(policy.parameters(), lr=6e-3))
    optimizer = lossscale.LossScaleOptimizer(inner, clip_norm=1.0)
    worst = 0.0
    for step in range(steps):
        tokens, sampled = sample(policy, 32)
        rewards = ((tokens.diff() - 1) % VOCABULARY < 4).float()
        logs = logs_of(policy, tokens)
        ratios = (logs - sampled).exp()
        optimizer.zero_grad()
        optimizer.backward(-((rewards - rewards.mean()) * ratios).mean())
        optimizer.step()
        worst = max(worst, off(logs.detach(), sampled))
        if step in (0, steps - 1):
            print(f"step {step + 1}: {rewards.mean():.0%} of the tokens are rewarded")
    print(f"the ratio was off by at most {worst:.1%}; steps skipped: {optimizer.steps_skipped}")


if __name__ == "__main__":
    if device == "cpu":
        # On arrays as small as these, several threads wait for one another most of the time.
        torch.set_num_threads(1)
    print(table())
    train()

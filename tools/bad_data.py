"""The effect of bad batches on a loss scale: rules on the gradients of five training runs.

`python -m tools.bad_data` trains five small PyTorch models in float32 and records the sizes of
their gradients in each step. Then it simulates each rule on them. A step is bad with a probability
p: its gradients are infinite at any scale. It prints the share of the gradients that float16
flushes to 0 in applied steps. `--page docs/internals/bad_data.md` writes the tables between the
markers of that page. It checks its rules and its law first. It takes about two minutes, and needs
PyTorch and scikit-learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import lossscale
from benchmarks.pages import insert
from lossscale.rules import DynamicScale

STEPS, SEEDS = 2500, 2
PROBABILITIES = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05)
SHIFTS = (0, 10, 20)
"""The loss is divided by 2 to the power of each, as in an average over many outputs."""
LOWEST, HIGHEST = -90, 40
"""The range of exponents of gradients that are counted."""
FLUSHED = -25
"""float16 rounds numbers below 2**-25 to 0."""
LIMIT = float(np.log2(65504.0))
MARKS = "<!-- rules: python -m tools.bad_data -->", "<!-- end of rules -->"
MARKS_OF_LAW = "<!-- law: python -m tools.bad_data -->", "<!-- end of law -->"


# --- Gradients of training runs -------------------------------------------------------------------


class Trace(NamedTuple):
    """The gradients of a training run, with respect to parameters and to the outputs of layers.

    Attributes:
        largest: float64 array of shape (steps,): log2 of the largest magnitude.
        below: float64 array of shape (steps, exponents): the share of the magnitudes of a tensor
            below 2 to the power of each exponent from `LOWEST` on, averaged over tensors.
        rules: For each of `SHIFTS` the rule that `diagnose` recommends at the start.
    """

    largest: Any
    below: Any
    rules: Mapping[int, DynamicScale]


@dataclasses.dataclass(frozen=True)
class Task:
    """A training run.

    Attributes:
        model: Creates the model.
        batch: Draws a batch.
        loss: Computes the loss of a model on a batch.
        rate: The learning rate of Adam.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    rate: float = 1e-3


def trace_of(task: Task, steps: int) -> Trace:
    """Trains, and returns the sizes of the gradients.

    Args:
        task: The training run.
        steps: Number of steps.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = task.model()
    rules = {shift: _diagnosed(model, task, shift) for shift in SHIFTS}
    optimizer = torch.optim.Adam(model.parameters(), task.rate)
    inside: list[torch.Tensor] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(functools.partial(_watch, inside))
    largest, below = np.empty(steps), np.empty((steps, HIGHEST - LOWEST + 1))
    for step in range(steps):
        inside.clear()
        optimizer.zero_grad()
        task.loss(model, task.batch(generator)).backward()
        given = [p.grad for p in model.parameters() if p.grad is not None]
        largest[step], below[step] = sizes([g.detach().numpy() for g in (*given, *inside)])
        optimizer.step()
    return Trace(largest, below, rules)


def _watch(inside: list[torch.Tensor], module: Any, given: Any, returned: Any) -> None:
    output = returned[0] if isinstance(returned, tuple) else returned
    if output.requires_grad:
        output.register_hook(inside.append)


def sizes(gradients: Sequence[Any]) -> tuple[float, Any]:
    """Returns log2 of the largest magnitude, and the share below each exponent.

    Args:
        gradients: float32 arrays. Arrays of zeros are ignored.

    Example:
        >>> largest, below = sizes([np.float32([1, 0.25, 0])])
        >>> largest, below[-1 - LOWEST : 2 - LOWEST].tolist()
        (0.0, [0.2, 0.2, 1.0])
    """
    largest, shares = 0.0, []
    for gradient in gradients:
        found = np.abs(gradient[gradient != 0]).astype(np.float64)
        if not found.size:
            continue
        largest = max(largest, float(found.max()))
        exponents = np.clip(np.frexp(found)[1] - 1, LOWEST, HIGHEST - 1) - LOWEST
        mass = np.cumsum(np.bincount(exponents, found, HIGHEST - LOWEST))
        shares.append(np.concatenate([[0.0], mass / mass[-1]]))
    return float(np.log2(largest)), np.mean(shares, axis=0)


def _diagnosed(model: nn.Module, task: Task, shift: int) -> DynamicScale:
    batches = [task.batch(torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    report = lossscale.torch.diagnose(model, lambda m, b: task.loss(m, b) / 2**shift, batches)
    return report.rule or DynamicScale()


def _images(generator: torch.Generator) -> Any:
    labels = torch.randint(4, (32,), generator=generator)
    images = 0.5 * torch.randn(32, 1, 12, 12, generator=generator)
    for place in range(4):
        images[labels == place, 0, 6 * (place // 2) :, 6 * (place % 2) :] += 0.5
    return images, labels


def _convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 4))


def _sums(generator: torch.Generator) -> Any:
    x = torch.rand(64, 24, 1, generator=generator)
    return x, x.sum(1)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.cell(x)[0][:, -1])


class _Adversarial(nn.Module):
    """A generator of points on a circle, and a critic that distinguishes them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 2))
        self.critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


def _circle(generator: torch.Generator) -> Any:
    angle = 6.283 * torch.rand(128, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1), torch.randn(128, 8, generator=generator)


def _adversarial_loss(model: Any, batch: Any) -> torch.Tensor:
    real, noise = batch
    # The generator gets the critic's gradient with the opposite sign: one step trains both.
    made = _Reversed.apply(model.maker(noise))
    softplus = nn.functional.softplus
    return (softplus(-model.critic(real)) + softplus(model.critic(made))).float().mean()


def _policy_loss(model: nn.Module, state: Any) -> torch.Tensor:
    """REINFORCE; the best action is the index of the largest of the first five numbers."""
    log = torch.log_softmax(model(state).float(), -1)
    action = torch.multinomial(log.detach().exp(), 1)
    reward = (action[:, 0] == state[:, :5].argmax(-1)).float() + 0.1 * torch.randn(len(state))
    return -((reward - reward.mean()) * log.gather(1, action)[:, 0]).mean()


def _physics_loss(model: nn.Module, x: Any) -> torch.Tensor:
    """u'' = -9.87 sin(3.14 x) with u = 0 at both ends, by second derivatives."""
    x = x.clone().requires_grad_()
    u = model(x).float()
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    ends = model(torch.tensor([[0.0], [1.0]])).float()
    return (second + 9.87 * torch.sin(3.1416 * x)).square().mean() + ends.square().mean()


def _dense(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), activation()]
        return nn.Sequential(*layers[:-1])

    return made


TASKS = {
    "convolutions": Task(
        _convolutional, _images, lambda m, b: nn.functional.cross_entropy(m(b[0]).float(), b[1])
    ),
    "GRU": Task(_Recurrent, _sums, lambda m, b: (m(b[0]).float() - b[1]).square().mean()),
    "adversarial": Task(_Adversarial, _circle, _adversarial_loss),
    "policy gradient": Task(
        _dense(8, 32, 5), lambda generator: torch.randn(64, 8, generator=generator), _policy_loss
    ),
    "second derivatives": Task(
        _dense(1, 24, 24, 1),
        lambda generator: torch.rand(64, 1, generator=generator),
        _physics_loss,
    ),
}


# --- The law of a scale under random overflows ----------------------------------------------------


def expected_drift(rule: DynamicScale, probability: float) -> float:
    """Returns the drift of a scale if steps overflow at random, whatever the scale is.

    Args:
        rule: The rule. Its minimum and maximum scale are assumed to be far away.
        probability: The probability p that a step overflows, above 0 and below 1.

    Returns:
        The mean change of log2(scale) per step. For doubling and halving it is
        p * q**N / (1 - q**N) - p**M, with q = 1 - p, N = `growth_interval` and
        M = `overflows_before_backoff`.

    Examples:
        >>> round(1000 * expected_drift(DynamicScale(), 1e-3), 3)
        -0.844
    """
    # log1p and expm1, because 1 - q**N loses all digits if p * N is small.
    log_finite = rule.growth_interval * math.log1p(-probability)
    growths = probability * math.exp(log_finite) / -math.expm1(log_finite)
    # A step lowers the scale if it is the last of M overflows in a row.
    backoffs = probability**rule.overflows_before_backoff
    return math.log2(rule.growth_factor) * growths + math.log2(rule.backoff_factor) * backoffs


def critical_probability(rule: DynamicScale) -> float:
    """Returns the probability of an overflow above which the scale falls: there the drift is 0.

    Args:
        rule: The rule.

    Examples:
        >>> f"{critical_probability(DynamicScale()):.3g}", f"{1 - 2 ** (-1 / 2000):.3g}"
        ('0.000347', '0.000347')
    """
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_drift(rule, middle) > 0 else (low, middle)
    return high


def law() -> str:
    """Returns a Markdown table of critical probabilities."""
    rules = {
        "`DynamicScale()`": DynamicScale(),
        "`growth_interval=100`": DynamicScale(growth_interval=100),
        "`overflows_before_backoff=2`": DynamicScale(overflows_before_backoff=2),
        "`overflows_before_backoff=3`": DynamicScale(overflows_before_backoff=3),
    }
    lines = ["| rule | the scale falls above |", "|---|---|"]
    shares = {name: 100 * critical_probability(rule) for name, rule in rules.items()}
    lines += [f"| {name} | {share:.2g}% |" for name, share in shares.items()]
    return "\n".join(lines)


# --- Simulated rules ------------------------------------------------------------------------------


class Scaler:
    """The loss scales of several runs at once, which a rule adjusts."""

    def __init__(self, rule: DynamicScale, runs: int) -> None:
        self.rule, first = rule, rule.init()
        # The dtypes of the wrappers: a float32 scale and integer counters.
        dtypes = (np.float32, *[np.int64] * (len(first) - 1))
        self.state = type(first)(
            *(np.full(runs, value, dtype) for value, dtype in zip(first, dtypes, strict=True))
        )

    def exponents(self) -> Any:
        """Returns log2 of the scale of each run."""
        return np.log2(self.state.scale.astype(np.float64))

    def step(self, finite: Any, bad: Any) -> None:
        """Updates the scales.

        Args:
            finite: Whether the gradients of each run were finite.
            bad: Whether they would be infinite at any scale.
        """
        before, after = self.state, self.rule.update(self.state, finite, xp=np)
        pairs = zip(after, before, strict=True)
        self.state = type(before)(*(np.asarray(new, old.dtype) for new, old in pairs))


class LossAware(Scaler):
    """Backs off only if the loss itself was finite."""

    def step(self, finite: Any, bad: Any) -> None:
        before = self.state
        super().step(finite, bad)
        kept = [np.where(bad, old, new) for old, new in zip(before, self.state, strict=True)]
        self.state = type(before)(*kept)


class Hysteresis(Scaler):
    """Megatron's scaler, which counts overflows until the scale grows, not in a row."""

    allowed = 2

    def __init__(self, rule: DynamicScale, runs: int) -> None:
        super().__init__(rule, runs)
        self.left = np.full(runs, self.allowed)

    def step(self, finite: Any, bad: Any) -> None:
        before = self.state
        super().step(finite, bad)
        grew = finite & (self.state.scale > before.scale)
        self.left = np.where(grew, self.allowed, self.left - ~finite)
        passes = ~finite & (self.left > 0)
        scale = np.where(passes, before.scale, self.state.scale)
        self.state = self.state._replace(scale=scale.astype(np.float32))


def scalers(trace: Trace, shift: int, runs: int) -> Iterator[tuple[str, Scaler]]:
    """Yields each rule with its name in the table."""
    yield "`DynamicScale()`", Scaler(DynamicScale(), runs)
    yield "`growth_interval=100`", Scaler(DynamicScale(growth_interval=100), runs)
    yield "Megatron's `hysteresis` 2", Hysteresis(DynamicScale(growth_interval=1000), runs)
    for waiting in (2, 3):
        rule = DynamicScale(overflows_before_backoff=waiting)
        yield f"`overflows_before_backoff={waiting}`", Scaler(rule, runs)
    yield "the rule of `diagnose`", Scaler(trace.rules[shift], runs)
    both = dataclasses.replace(trace.rules[shift], overflows_before_backoff=2)
    yield "the same, `overflows_before_backoff=2`", Scaler(both, runs)
    yield "no back-off where the loss is not finite", LossAware(DynamicScale(), runs)


def flushed(trace: Trace, scaler: Scaler, shift: int, bad: Any) -> tuple[Any, Any]:
    """Returns the outcome of a training run, for each simulated run.

    Args:
        trace: The gradients.
        scaler: The scales, which it updates.
        shift: The loss is divided by 2 to the power of this.
        bad: Booleans of shape (steps, runs): whether a step is bad.

    Returns:
        The share of gradients that are flushed in applied steps, and the share of steps that are
        skipped although they are not bad: two arrays of shape (runs,).
    """
    lost, applied, skipped = (np.zeros(bad.shape[1]) for _ in range(3))
    for largest, below, each in zip(trace.largest, trace.below, bad, strict=True):
        exponent = scaler.exponents() - shift
        fits = largest + exponent <= LIMIT
        finite = fits & ~each
        edge = np.clip(np.ceil(FLUSHED - exponent).astype(int) - LOWEST, 0, len(below) - 1)
        lost += np.where(finite, below[edge], 0.0)
        applied += finite
        skipped += ~fits & ~each
        scaler.step(finite, each)
    return lost / np.maximum(applied, 1), skipped / len(bad)


def tables(traces: Sequence[Trace]) -> str:
    """Returns a Markdown table for each shift: the mean over training runs and seeds."""
    runs = len(PROBABILITIES) * SEEDS
    parts = []
    for shift in SHIFTS:
        rows: dict[str, list[Any]] = {}
        for number, trace in enumerate(traces):
            drawn = np.random.default_rng(number).random((len(trace.largest), runs))
            bad = drawn < np.repeat(PROBABILITIES, SEEDS)
            for name, scaler in scalers(trace, shift, runs):
                rows.setdefault(name, []).append(flushed(trace, scaler, shift, bad))
        size = "The loss as it is" if not shift else f"The loss divided by 2\\*\\*{shift}"
        heads = (size, *(f"{p:.1%}" for p in PROBABILITIES), "skipped in vain")
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for name, found in rows.items():
            lost, vain = np.mean([each[0] for each in found], 0), np.mean([e[1] for e in found], 0)
            cells = [f"{share:.1%}" for share in lost.reshape(-1, SEEDS).mean(1)]
            lines.append("| " + " | ".join([name, *cells, f"{vain[:SEEDS].mean():.2%}"]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def stationary_drift(rule: DynamicScale, probability: float) -> float:
    """The drift by the stationary distribution of both counters, a Markov chain.

    The first states are numbers of finite steps in a row, and then those of overflows.

    Args:
        rule: The rule.
        probability: That of an overflow in a step.
    """
    interval, waits = rule.growth_interval, rule.overflows_before_backoff
    finite, size = 1 - probability, interval + waits
    move = np.zeros((size, size))
    for state in range(size):
        count = state if state < interval else 0
        move[state, (count + 1) % interval] += finite
        overflows = state - interval + 1 if state >= interval else 0
        move[state, interval + min(overflows + 1, waits) - 1] += probability
    # The left eigenvector of 1, and its sum.
    system = np.vstack([move.T - np.eye(size), np.ones(size)])
    share, *_ = np.linalg.lstsq(system, np.r_[np.zeros(size), 1.0], rcond=None)
    grows = share[interval - 1] + (share[interval:].sum() if interval == 1 else 0)
    growth, backoff = np.log2([rule.growth_factor, rule.backoff_factor])
    return float(growth * grows * finite + backoff * share[interval + waits - 1])


def check() -> None:
    """Compares the law with the chain, and each scaler and what it flushes with known numbers."""
    for interval, waits, factor in ((1, 1, 2.0), (1, 3, 2.0), (7, 2, 4.0), (40, 4, 8.0)):
        rule = DynamicScale(
            growth_interval=interval, overflows_before_backoff=waits, growth_factor=factor
        )
        for probability in (1e-9, 0.01, 0.3, 0.999, critical_probability(rule)):
            drift = expected_drift(rule, probability)
            assert abs(drift - stationary_drift(rule, probability)) < 1e-9
        assert abs(drift) < 1e-9
    overflows, rule = (0, 1, 0, 1, 0, 1, 1, 1), DynamicScale(2.0**15)
    for kind, expected in (
        (Scaler, (15, 14, 14, 13, 13, 12, 11, 10)),
        # The first one is let pass, and then none until the scale grows.
        (Hysteresis, (15, 15, 15, 14, 14, 13, 12, 11)),
        (LossAware, (15,) * 8),
    ):
        scaler = kind(rule, 1)
        for overflow, exponent in zip(overflows, expected, strict=True):
            bad = np.array([bool(overflow)])
            scaler.step(~bad, bad)
            assert scaler.exponents()[0] == exponent
    # Shares of 0.25, 0.5 and 1 below 2**-30, 2**-20 and 2**0; the largest is 2**-1.
    shares = np.zeros(HIGHEST - LOWEST + 1)
    for exponent, share in zip((-30, -20, 0), (0.25, 0.5, 1.0), strict=True):
        shares[exponent - LOWEST :] = share
    trace = Trace(np.full(4, -1.0), np.tile(shares, (4, 1)), {0: rule})
    for exponent, lost in ((0, 0.25), (6, 0.0), (-5, 0.5), (-30, 1.0)):
        scaler = Scaler(DynamicScale(2.0**exponent, min_scale=2.0**-40), 1)
        found, vain = flushed(trace, scaler, 0, np.zeros((4, 1), bool))
        assert (found[0], vain[0]) == (lost, 0.0)


def main(command_line: list[str] | None = None) -> None:
    """Trains, runs the rules and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bad_data", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--page", type=pathlib.Path, help="a page to write the tables into")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    options = parser.parse_args(command_line)
    check()
    text = tables([trace_of(task, options.steps) for task in TASKS.values()])
    print(f"{law()}\n\n{text}")
    if options.page is not None:
        insert(options.page, f"\n{law()}\n", *MARKS_OF_LAW)
        insert(options.page, f"\n{text}\n", *MARKS)


if __name__ == "__main__":
    main()

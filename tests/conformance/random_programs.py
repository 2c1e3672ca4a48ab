"""Programs made at random, and what they must do, computed with NumPy.

A program drives one optimizer with steps of which some overflow, on all of its variables or some,
at scales from 2**-126 to 2**126; it writes files and goes on from them with another optimizer, and
copies its optimizer. The oracle knows nothing of this package but the arguments of the rule.
All is exact: the scales and the learning rate are powers of two, so each operation of an SGD with
momentum rounds alike wherever it is computed, and weights are compared bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from conformance.wrappers import Wrapper
from core import oracle
from lossscale import DynamicScale

# For each way in which gradients are read: small ones together, large ones by their sums.
SHAPES = ((130, 130), (5,), (3, 2), (20_000,))
RATE, MOMENTUM = 2.0**-13, 0.5
INNER = "small-momentum"

LOW = DynamicScale(2.0**15, growth_interval=2, min_scale=2.0**-126)
"""The rule of every wrapper that has rules; it reaches every scale."""
OLDER = DynamicScale(2.0**15, growth_interval=2, min_scale=1.0, max_scale=None)
"""That of the others."""


class Expected(NamedTuple):
    """What an optimizer must hold."""

    weights: list[Any]
    momenta: list[Any]
    scale: float
    good_steps: int = 0
    skipped: int = 0
    last_skipped: bool = False
    steps: int = 0


def stepped(before: Expected, gradients: list[Any], rule: DynamicScale) -> Expected:
    """Returns what a step makes of it, with the gradients of the loss; None for no gradient."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = [None if g is None else g * np.float32(before.scale) for g in gradients]
    finite = all(np.isfinite(g).all() for g in scaled if g is not None)
    from_here = dataclasses.replace(rule, initial_scale=before.scale)
    [(scale, good_steps)] = oracle.trace(from_here, [finite], streak=before.good_steps)
    weights, momenta = list(before.weights), list(before.momenta)
    for index, gradient in enumerate(gradients if finite else ()):
        if gradient is not None:
            momenta[index] = momenta[index] * np.float32(MOMENTUM) + gradient
            weights[index] = weights[index] - np.float32(RATE) * momenta[index]
    skipped, steps = before.skipped + (not finite), before.steps + 1
    return Expected(weights, momenta, scale, good_steps, skipped, not finite, steps)


class Run:
    """A program that is under way, and writes its files into a folder."""

    # An optimizer that is copied is compiled once more.
    copies_at_random = True

    def __init__(self, wrapper: Wrapper, seed: int, folder: pathlib.Path) -> None:
        self.random = np.random.default_rng(seed)
        self.rule = OLDER if wrapper.takes_loss_scales_only else LOW
        self.wrapper, self.folder = wrapper, folder
        values = [self.random.normal(size=shape).astype(np.float32) for shape in SHAPES]
        # Each goes on from the files of the other.
        self.harness, self.other = (wrapper.harness(values, INNER, self.rule) for _ in range(2))
        momenta = [np.zeros_like(value) for value in values]
        self.expected = Expected(values, momenta, self.rule.initial_scale)
        self.log: list[str] = []

    def act(self) -> None:
        """Does one thing of those that programs do, and checks what there is then."""
        copies = 0.03 if self.copies_at_random else 0.0
        kinds = {self.step: 0.88 - copies, self.move_scale: 0.07, self.reload: 0.05}
        kinds[self.copy] = copies
        chosen = self.random.choice(len(kinds), p=list(kinds.values()))
        list(kinds)[chosen]()
        self.check()

    def step(self) -> None:
        """Takes a step, sometimes with an infinity or NaN, sometimes for some variables only."""
        gradients: list[Any] = self.drawn()
        # PyTorch's fused SGD takes no parameter whose first gradient comes later than others'.
        has_applied = self.expected.steps > self.expected.skipped
        may_be_missing = self.wrapper.is_an_object and (
            has_applied or self.wrapper.family != "torch-device"
        )
        chance = self.random.random()
        if chance < 0.15:
            spoiled = gradients[self.random.integers(len(gradients))]
            spoiled.flat[self.random.integers(spoiled.size)] = self.random.choice(
                [np.inf, -np.inf, np.nan]
            )
        elif chance < 0.25 and may_be_missing:
            # Each way is compiled by itself; a promise has the second one.
            gradients[self.random.integers(1 if self.wrapper.compiles else 2)] = None
        self.take(gradients)

    def drawn(self) -> list[Any]:
        """Returns finite gradients."""
        exponent = math.log2(self.expected.scale)
        # Small enough to be a normal number once it is scaled; large enough to overflow at times.
        low = max(-8, math.ceil(-126 - exponent))
        gradients: list[Any] = []
        for shape in SHAPES:
            exponents = self.random.integers(low, max(low + 1, 12), shape)
            sizes = np.ldexp(1 + self.random.random(shape), exponents)
            signs = self.random.choice([-1.0, 0.0, 1.0], shape)
            gradients.append((signs * sizes).astype(np.float32))
        return gradients

    def take(self, gradients: list[Any]) -> None:
        """Takes a step with these gradients."""
        self.log.append(f"step {gradients}")
        self.harness.step(gradients)
        self.expected = stepped(self.expected, gradients, self.rule)

    def take_what_is_hard_to_read(self) -> None:
        """Takes steps whose gradients have sums that say nothing of their elements, or are zero."""
        self.move_scale(2.0**110)
        large, *others = self.drawn()
        opposite = large.copy()
        opposite.flat[:2] = np.inf, -np.inf
        # Every element is finite once it is scaled, and their sum is not.
        self.take([np.full_like(large, 2.0**14), *others])
        self.take([opposite, *others])
        self.take([gradient * np.float32(-0.0) for gradient in (large, *others)])
        self.check()

    def move_scale(self, scale: float = 0.0) -> None:
        """Sets the scale, as a program does that restarts with another one; 0 draws one."""
        lowest, highest = math.log2(self.rule.min_scale), 126
        scale = scale or 2.0 ** int(self.random.integers(lowest, highest + 1))
        self.log.append(f"scale {scale}")
        self.harness.set_scale(scale)
        self.expected = self.expected._replace(scale=scale)
        self.has_loaded()

    def reload(self) -> None:
        """Writes a file, and goes on from it with another optimizer."""
        self.log.append("reload")
        path = self.folder / f"{len(self.log)}.weights.h5"
        self.harness.save(path)
        self.other.load(path)
        self.harness, self.other = self.other, self.harness
        self.has_loaded()

    def has_loaded(self) -> None:
        if not self.harness.saves_last_step_skipped:
            self.expected = self.expected._replace(last_skipped=False)

    def copy(self) -> None:
        """Goes on with a copy, and leaves behind the original."""
        self.log.append("copy")
        self.harness = copy.copy(self.harness)
        self.harness.become_a_copy()

    def check(self) -> None:
        """Compares what there is with what there must be."""
        expected, harness = self.expected, self.harness
        found = (harness.scale(), harness.counters())
        wanted = (
            np.float32(expected.scale),
            (expected.good_steps, expected.skipped, expected.last_skipped, expected.steps),
        )
        assert found == wanted, (found, wanted, self.log[-3:])
        for weight, value in zip(harness.parameters(), expected.weights, strict=True):
            assert weight.tobytes() == value.tobytes(), (weight, value, self.log[-3:])

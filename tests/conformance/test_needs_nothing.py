"""A rule that asks for nothing but the verdict pays for nothing else, on every shell."""

import importlib

import numpy as np
import pytest

from conformance.recordings import GRADIENTS, VALUES, spoiled
from conformance.shells import BACKEND
from lossscale import DynamicScale, Needs


class Asking(DynamicScale):
    needs = Needs(largest=True, counts_from=(1.0,))


@pytest.fixture
def looked(monkeypatch):
    """How often gradients were taken apart to see how large they are."""
    magnitudes = importlib.import_module(f"lossscale.{BACKEND}.gradient_stats")
    calls, take_apart = [], magnitudes.real_parts
    monkeypatch.setattr(magnitudes, "real_parts", lambda g: calls.append(g) or take_apart(g))
    return calls


def steps(shell, rule):
    harness = shell.make(VALUES, "sgd", rule)
    for gradients in (GRADIENTS, spoiled(np.nan), GRADIENTS):
        harness.step(gradients)
    # A loop within a compiled function runs when its result is asked for.
    harness.parameters()


def test_gradients_are_measured_for_a_rule_that_asks_and_for_no_other(shell, looked):
    if shell.like:
        pytest.skip(f"it moves its rule as {shell.like} does")
    steps(shell, DynamicScale(8.0))
    assert looked == []
    steps(shell, Asking(8.0))
    assert looked

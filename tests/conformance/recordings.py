"""A run of each inner optimizer with and without loss scaling, taken once for all that read it.

Compiling the two steps is what such a run costs, so several promises are read off the same one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from typing import Any, NamedTuple

import numpy as np
import pytest

from conformance.inner_optimizers import RULE, WITH_STATE
from conformance.wrappers import Wrapper

VALUES = [np.array([1.0, -2.0, 3.0], np.float32), np.array([[0.5, 0.25]], np.float32)]
GRADIENTS = [np.array([0.5, -1.0, 2.0], np.float32), np.array([[4.0, -0.125]], np.float32)]

# What each step does to the gradients; a number that is not finite stands in the last place of one.
_FACTORS = (np.nan, 1.0, 0.5, np.inf, -3.0, np.nan, -np.inf, 0.75, 1.25, 1.0)


ROUNDING = 4
"""In units in the last place of the largest number of an array: a small one is a difference of
large ones, and what one step rounds otherwise is in the next ones too."""


def same_bits(left: list[Any], right: list[Any]) -> None:
    """Asserts that arrays are equal to the last bit."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def same_training(wrapper: Wrapper, scaled: list[Any], plain: list[Any]) -> None:
    """Asserts that training with loss scaling gave what training without it gives.

    To the last bit, but where Grappler optimizes the step, which may fuse what stands in a branch
    otherwise than what stands outside of one, or XLA does so for a GPU.
    """
    on_a_gpu = wrapper.backend == "jax" and os.environ.get("LOSSSCALE_TEST_DEVICE") == "cuda"
    if wrapper.has_grappler or (wrapper.compiles and on_a_gpu):
        same_but_for_rounding(scaled, plain)
    else:
        same_bits(scaled, plain)


def same_but_for_rounding(left: list[Any], right: list[Any]) -> None:
    """Asserts that arrays are equal to within `ROUNDING`."""
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        unit = np.spacing(np.abs(b).max(initial=0)) if a.dtype.kind == "f" else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING * unit)


def spoiled(value: float, tensor: int = 0) -> list[Any]:
    """Returns the gradients with one element replaced by `value`."""
    gradients = [gradient.copy() for gradient in GRADIENTS]
    gradients[tensor].flat[-1] = value
    return gradients


class Snapshot(NamedTuple):
    """What a harness holds after a step."""

    parameters: list[Any]
    state: list[Any]
    scale: Any = None
    counters: Any = None


class Step(NamedTuple):
    """One step: before and after it, and the bare optimizer after the same finite steps."""

    finite: bool
    before: Snapshot
    scaled: Snapshot
    plain: Snapshot


@functools.cache
def recorded(wrapper: Wrapper, inner: str) -> tuple[Step, ...]:
    """Returns the steps of a run, which begins with one that is skipped."""
    if wrapper.like and inner not in WITH_STATE:
        pytest.skip(f"what is inside of it is run as in {wrapper.like}")
    scaled = wrapper.make(VALUES, inner, RULE)
    plain = wrapper.make_bare(VALUES, inner, RULE)
    steps = []
    for factor in _FACTORS:
        finite = bool(np.isfinite(factor))
        before = _snapshot(scaled)
        if wrapper.is_an_object:
            # Reading changes nothing that a step does.
            _read_everything(scaled.optimizer)
        if finite:
            gradients = [gradient * np.float32(factor) for gradient in GRADIENTS]
            plain.step(gradients)
        else:
            gradients = spoiled(factor, tensor=len(steps) % 2)
        scaled.step(gradients)
        bare = Snapshot(plain.parameters(), plain.inner_state())
        steps.append(Step(finite, before, _snapshot(scaled), bare))
    return tuple(steps)


def _snapshot(harness: Any) -> Snapshot:
    return Snapshot(
        harness.parameters(), harness.inner_state(), harness.scale(), harness.counters()
    )


def _read_everything(optimizer: Any) -> None:
    """Reads what a debugger shows of an object: its `repr` and its properties."""
    assert "\n" not in repr(optimizer)
    for name, member in inspect.getmembers_static(type(optimizer)):
        if isinstance(member, property) and not name.startswith("_"):
            with contextlib.suppress(Exception):
                getattr(optimizer, name)

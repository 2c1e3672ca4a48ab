"""Checks of the arguments of a gradient scaler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lossscale.arguments import checked_rule
from lossscale.checks import SMALLEST_SCALE, checked_number
from lossscale.errors import ArgumentError, ScalerArgumentError
from lossscale.rules import DynamicScale, ScaleRule

DEFAULTS = DynamicScale(initial_scale=2.0**16, min_scale=SMALLEST_SCALE)
"""The defaults of PyTorch's scaler, and the lowest safe scale."""


@contextlib.contextmanager
def as_of_a_scaler() -> Iterator[None]:
    """Raises an `ArgumentError` as one that is also an `AssertionError`, as PyTorch's are."""
    try:
        yield
    except ArgumentError as error:
        raise ScalerArgumentError(str(error)) from None


def rule_of_a_scaler(rule: Any, **numbers: Any) -> ScaleRule:
    """Returns the rule that the arguments describe.

    Args:
        rule: A rule, or None.
        numbers: By the names of `DynamicScale`; None for its limits stands for the widest.

    Raises:
        ScalerArgumentError: If a number cannot be used, or is given beside a rule.
        ArgumentTypeError: If `rule` is not a rule.
    """
    if rule is None:
        if numbers["min_scale"] is None:
            numbers["min_scale"] = DEFAULTS.min_scale
        with as_of_a_scaler():
            return DynamicScale(**numbers)
    checked = checked_rule(rule)
    usual = {**DEFAULTS.get_config(), "min_scale": None}
    given = {name: value for name, value in numbers.items() if value != usual[name]}
    if given:
        raise ScalerArgumentError(
            "`rule` already says how the scale moves; leave out what else does. Received: "
            f"rule={rule!r}, and {', '.join(f'{name}={value!r}' for name, value in given.items())}."
        )
    return checked


def new_scale_of(new_scale: Any, rule: ScaleRule) -> float:
    """Returns the number that `update(new_scale)` sets.

    Args:
        new_scale: A number, or a tensor with one element that needs no gradient.
        rule: The rule, whose range it must lie in.

    Raises:
        ScalerArgumentError: If it is none of these.
    """
    if isinstance(new_scale, torch.Tensor):
        if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.is_complex():
            raise ScalerArgumentError(
                "`new_scale` must be a number, or a tensor with one element and without "
                f"requires_grad. Received: new_scale={new_scale!r}."
            )
        new_scale = new_scale.item()
    with as_of_a_scaler():
        number = checked_number("new_scale", new_scale)
    if not rule.moves:
        raise ScalerArgumentError(
            f"update() cannot set the scale of this scaler: its rule fixes it at "
            f"{rule.init().scale:g}. Received: new_scale={new_scale!r}. Make the scaler with "
            "another `rule`."
        )
    restored = rule.restored(rule.init()._replace(scale=number))
    if float(restored.scale) != number:
        limits = ""
        if isinstance(rule, DynamicScale):
            limits = f", from {rule.min_scale:g} to {rule.ceiling:g}"
        raise ScalerArgumentError(
            f"`new_scale` must lie in the range of the scaler's rule{limits}. "
            f"Received: new_scale={new_scale!r}."
        )
    return number

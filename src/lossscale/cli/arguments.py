"""Arguments as they are written on a command line: rules, numbers, backends."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from lossscale.cli.files import UsageError, usage_errors
from lossscale.packages import BACKENDS
from lossscale.rules import RULES, ScaleRule

_OLD_NAMES = {"dynamic": "DynamicScale", "fixed": "FixedScale"}
_WORDS = {"true": True, "false": False, "none": None}


def rule_from_words(words: Sequence[str]) -> ScaleRule:
    """Returns the rule that words describe.

    Args:
        words: The name of its class, and its configuration as NAME=VALUE. A number may be a power
            of two, such as 2**16.

    Raises:
        UsageError: If there is no such rule or setting, or a value cannot be used.

    Examples:
        >>> rule_from_words(["DynamicScale", "growth_interval=500"]).growth_interval
        500
        >>> rule_from_words(["FixedScale", "scale=2**7"])
        FixedScale(scale=128.0, skip_nonfinite=False)
    """
    name, *rest = words
    old, _, settings = name.partition(":")
    if old in _OLD_NAMES:
        now = " ".join([_OLD_NAMES[old], *settings.split(",")]).strip()
        raise UsageError(f"--rule: {name} is written --rule {now}")
    if name not in RULES:
        raise UsageError(f"--rule: there is no rule {name!r}; known are {', '.join(RULES)}")
    fields = {field.name: field for field in dataclasses.fields(RULES[name])}
    found: dict[str, Any] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if key not in fields:
            raise UsageError(f"--rule: {name} has no {key!r}; it has {', '.join(fields)}")
        if not equals or key in found:
            raise UsageError(f"--rule: {key} must be given once, as {key}=VALUE")
        found[key] = _value(key, value)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in found:
            raise UsageError(f"--rule: {name} needs {key}: {name} {key}=VALUE")
    with usage_errors():
        rule: ScaleRule = RULES[name](**found)
    return rule


def _value(key: str, text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    power = re.fullmatch(r"2(?:\.0?)?\*\*(-?\d{1,3})", text)
    try:
        if power:
            exponent = int(power[1])
            return 2**exponent if exponent >= 0 else 2.0**exponent
        return int(text) if re.fullmatch(r"[+-]?\d{1,300}", text) else float(text)
    except ValueError:
        raise UsageError(
            f"--rule: {key} must be a number such as 0.5 or 2**16, not {text!r}"
        ) from None


def integer(text: str, lowest: int, highest: int) -> int:
    """Returns the integer that a text shows.

    Raises:
        argparse.ArgumentTypeError: If it shows none, or one that is out of the range.
    """
    # isdecimal() keeps out what int() would take: "1_0", " 7", "-1".
    if not (text.isascii() and text.isdecimal() and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(
            f"must be an integer from {lowest} to {highest}, not {text!r}"
        )
    return int(text)


def seed(text: str) -> int:
    """Returns the seed of random numbers that a text shows, from 0 to 2**32 - 1."""
    return integer(text, 0, 2**32 - 1)


def probability(text: str) -> float:
    """Returns the probability that a text shows, from 0 to 1.

    Raises:
        argparse.ArgumentTypeError: If it shows none.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {text!r}")
    return number


def choose_backend(requested: str | None, others: Iterable[str] = ()) -> str:
    """Returns the backend to use, and has Keras use it.

    Args:
        requested: One of `BACKENDS`, or None: then the one Keras was imported with, or the one
            that the environment variable KERAS_BACKEND names, or tensorflow.
        others: What else the caller takes, for the message.

    Raises:
        UsageError: If there is no such backend, or Keras is imported with another one.
    """
    loaded = sys.modules.get("keras")
    in_use = loaded.backend.backend() if loaded is not None else None
    backend = requested
    if backend is None:
        backend = in_use or os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend not in BACKENDS:
        known = ", ".join((*BACKENDS, *others))
        raise UsageError(f"the backend must be one of {known}, not {backend!r}")
    if in_use not in (None, backend):
        raise UsageError(
            f"Keras is already imported with the backend {in_use}; "
            f"use a new process for the backend {backend}"
        )
    if in_use is None:
        os.environ["KERAS_BACKEND"] = backend
        # TensorFlow's notes on the processor would be drawn over the progress bars.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return backend

"""A rule as it is written on a command line: `DynamicScale growth_interval=500`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from lossscale.cli.errors import UsageError
from lossscale.cli.files import usage_errors
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

    Example:
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

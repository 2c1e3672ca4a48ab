"""A rule as it is written on a command line: `dynamic:initial_scale=2**16,growth_interval=500`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from lossscale.cli.errors import UsageError
from lossscale.cli.files import usage_errors
from lossscale.rules import DynamicScale, FixedScale, ScaleRule

RULES: dict[str, type[Any]] = {"dynamic": DynamicScale, "fixed": FixedScale}
_WORDS = {"true": True, "false": False, "none": None}


def rule_from_text(text: str) -> ScaleRule:
    """Returns the rule that a text describes.

    Args:
        text: The name of a rule, and after a colon its arguments, as in the docstring of this
            module. A number may be a power of two, such as 2**16.

    Raises:
        UsageError: If there is no such rule or argument, or a value cannot be used.

    Example:
        >>> rule_from_text("dynamic:initial_scale=2**16,growth_interval=500").growth_interval
        500
        >>> rule_from_text("fixed:scale=128")
        FixedScale(scale=128.0, skip_nonfinite=False)
    """
    name, _, rest = text.partition(":")
    if name not in RULES:
        raise UsageError(f"--rule: there is no rule {name!r}; known are {', '.join(RULES)}")
    fields = dataclasses.fields(RULES[name])
    known = [field.name for field in fields]
    settings: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if key not in known:
            raise UsageError(
                f"--rule: the rule {name} has no argument {key!r}; it has {', '.join(known)}"
            )
        if not equals or key in settings:
            raise UsageError(f"--rule: {key} must be given once, as {key}=VALUE")
        settings[key] = _value(key, value)
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.name not in settings
    ]
    if missing:
        raise UsageError(f"--rule: the rule {name} needs {missing[0]}: {name}:{missing[0]}=VALUE")
    with usage_errors():
        rule: ScaleRule = RULES[name](**settings)
    return rule


def _value(key: str, text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    power = re.fullmatch(r"2\*\*(-?\d{1,3})", text)
    if power:
        exponent = int(power[1])
        return 2**exponent if exponent >= 0 else 2.0**exponent
    if re.fullmatch(r"[+-]?\d{1,300}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"--rule: {key} must be a number such as 0.5 or 2**16, not {text!r}"
        ) from None

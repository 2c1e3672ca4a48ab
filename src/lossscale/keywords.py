"""What an error says of a keyword that a function does not take: what to write in its place.

A setting has another name in each library, and programs bring several at once. What is answered
can be written as it stands: settings that a function has no keywords for stand in one rule.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

SETTING = {
    name: setting
    for setting, names in {
        "initial_scale": ("init_scale", "initial_loss_scale", "scale"),
        # TensorFlow 2.4 and 2.0; Apex and fairseq; DeepSpeed and Megatron; jmp.
        "growth_interval": (
            *("dynamic_growth_steps", "increment_period"),
            *("scale_window", "loss_scale_window", "period"),
        ),
        "growth_factor": ("multiplier", "scale_factor", "factor"),
        "backoff_factor": (),
        "min_scale": ("min_loss_scale", "minimum_scale"),
        "max_scale": ("max_loss_scale", "maximum_scale"),
        "overflows_before_backoff": ("hysteresis", "delayed_shift"),
    }.items()
    for name in (setting, *names)
}
"""The setting of `DynamicScale` that a name means, here or in another library."""

SCALES = ("loss_scale", "loss_scale_value", "static_loss_scale", "loss_scale_factor")
"""What a loss scale is called where it may be a fixed or the first one."""

_CLIPPING = ("clip_norm", "max_norm", "max_grad_norm", "gradient_clip_val")

_OF_OPTIMIZERS = (
    *("learning_rate", "lr", "momentum", "weight_decay", "clipnorm", "global_clipnorm"),
    *("clipvalue", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
    "gradient_accumulation_steps",
)
# The form of TensorFlow 2.0 has an object for them.
_OF_DYNAMIC_LOSS_SCALE = {
    "initial_scale": "initial_loss_scale",
    "growth_interval": "increment_period",
    "growth_factor": "multiplier",
}


def unknown_keywords(
    owner: str,
    given: Mapping[str, Any],
    taken: Iterable[str],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Returns what an error says of keywords that a function does not take.

    Args:
        owner: Its name.
        given: All keywords that it was given, and their values.
        taken: Those that it takes.
        instead: What to write for some that this function alone answers so, a format of `value`.
            `clip_norm` stands for all words for the largest norm.

    Examples:
        >>> unknown_keywords("f", {"init_scale": 8, "rul": 1}, ["initial_scale", "rule"])
        'f has no argument `init_scale`: write initial_scale=8. It has no argument `rul`: did you mean `rule`?'
        >>> unknown_keywords("f", {"period": 9, "factor": 2}, ["initial_scale", "rule"])
        'f has no arguments: `period`, `factor`; write rule=lossscale.DynamicScale(growth_interval=9, growth_factor=2).'
    """  # noqa: E501
    taken = list(taken)
    unknown = {name: value for name, value in given.items() if name not in taken}
    settings = _settings(unknown, taken, instead)
    answers: dict[str, list[str]] = {}
    for name, value in unknown.items():
        if name in (*_CLIPPING, "clipnorm", "global_clipnorm") and "clip_norm" in taken:
            answer = f"write clip_norm={value!r}."
        elif written := instead.get("clip_norm" if name in _CLIPPING else name):
            answer = f"write {written.format(value=value)}."
        elif name in settings:
            answer = f"write {_as_written(settings, given, taken)}."
        elif said := _answer(name, value, taken):
            answer = f"{said}."
        # Words that share a few letters mean something else.
        elif close := difflib.get_close_matches(name, taken, n=1, cutoff=0.75):
            answer = f"did you mean `{close[0]}`?"
        else:
            answer = f"it takes {', '.join(taken)}."
        answers.setdefault(answer, []).append(f"`{name}`")
    parts: list[str] = []
    for answer, names in answers.items():
        several = f"arguments: {', '.join(names)};"
        named = several if len(names) > 1 else f"argument {names[0]}:"
        parts.append(f"{'It' if parts else owner} has no {named} {answer}")
    return " ".join(parts)


def _settings(
    unknown: Mapping[str, Any], taken: list[str], instead: Mapping[str, str]
) -> dict[str, str]:
    """The setting of a `DynamicScale` that each of them means which means one."""
    if not any(name in ("rule", *SCALES) or name in SETTING for name in taken):
        return {}  # It is no matter of a loss scale.
    settings = {name: SETTING[name] for name in unknown if name in SETTING and name not in instead}
    if settings and "initial_scale" not in settings.values():
        # Beside what moves it, a scale is the first one.
        first = [name for name in unknown if name in SCALES and unknown[name] != "dynamic"]
        settings |= dict.fromkeys(first[:1], "initial_scale")
    return settings


def _as_written(settings: Mapping[str, str], given: Mapping[str, Any], taken: list[str]) -> str:
    """How settings of a `DynamicScale` are written for a function."""
    values = {setting: given[name] for name, setting in settings.items()}
    own = {SETTING[name]: name for name in taken if name in SETTING}
    if values.keys() <= own.keys():
        return _joined({own[setting]: value for setting, value in values.items()})
    if "loss_scale" in taken and values.keys() <= _OF_DYNAMIC_LOSS_SCALE.keys():
        words = {_OF_DYNAMIC_LOSS_SCALE[setting]: value for setting, value in values.items()}
        return f"loss_scale=lossscale.experimental.DynamicLossScale({_joined(words)})"
    # A rule says everything, so what came by its right name stands in it too.
    right = [name for name in given if name in own.values()]
    values = {SETTING[name]: given[name] for name in right} | values
    rule = f"lossscale.DynamicScale({_joined(values)})"
    if "rule" in taken:
        return f"rule={rule}{' without ' if right else ''}{', '.join(f'`{n}`' for n in right)}"
    if "loss_scale" in taken:
        return f"lossscale.LossScaleOptimizer(optimizer, rule={rule})"
    return f"{rule} for a scale that moves so"


def _answer(name: str, value: Any, taken: list[str]) -> str | None:
    """What is said of a keyword that is no setting of a `DynamicScale`, or None."""
    inner = [each for each in taken if each in ("inner_optimizer", "inner", "optimizer")]
    if name in _OF_OPTIMIZERS and inner:
        return f"set it on the `{inner[0]}`"
    first = [each for each in taken if SETTING.get(each) == "initial_scale"]
    scale = [each for each in taken if each in (*SCALES, "scale")]
    if not first and not scale:
        return None

    def fixed(number: str) -> str:
        if scale:
            return f"{scale[0]}={number}"
        if "rule" in taken:
            return f"rule=lossscale.FixedScale({number})"
        return f"lossscale.FixedScale({number})"

    if name in SCALES and value == "dynamic" and not scale:
        return "leave it out, the scale moves by itself"
    if name in SCALES and scale:
        return f"write {fixed(repr(value))}"
    if name in SCALES:
        moving = f"{first[0]}={value!r} for one that moves"
        return f"write {fixed(repr(value))} for a fixed scale, or {moving}"
    if name == "enabled":
        return (
            f"write {fixed('1.0')} where no loss scaling is wanted"
            if not value
            else ("leave it out, it is enabled")
        )
    if name == "skip_nonfinite" and not scale:
        numbers = f"scale, skip_nonfinite={value!r}"
        return f"write {fixed(numbers)}, a scale that moves skips them anyway"
    return None


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())

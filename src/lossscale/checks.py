"""Checks of arguments that several functions have."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

LARGEST_SCALE = 2.0**126
"""Largest loss scale: above it the reciprocal is not a normal float32 number."""

SMALLEST_SCALE = 2.0**-126
"""Smallest loss scale: the smallest normal float32 number."""

LONGEST_INTERVAL = 2**31 - 1
"""Longest growth interval: the largest number of a 32-bit counter."""


def checked_count(name: str, value: Any, *, lowest: int = 1) -> int:
    """Returns `value` as an int.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        lowest: The lowest valid integer.

    Raises:
        ArgumentError: If it is not an integer, or below `lowest`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or number < lowest:
        raise ArgumentError(
            f"`{name}` must be an integer of at least {lowest}. Received: {name}={value!r}."
        )
    return number


def checked_number(name: str, value: Any) -> float:
    """Returns `value` as a float; it may be infinite or NaN.

    Raises:
        ArgumentError: If it is not a number.
    """
    # float() would accept "8" and True.
    if not isinstance(value, (bool, str, bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise ArgumentError(
        f"`{name}` must be a number. Received: {name}={value!r} of type {type(value).__name__}."
    )


def checked_above_zero(name: str, value: Any) -> float:
    """Returns `value` as a float that is finite and above 0.

    Raises:
        ArgumentError: If it is not such a number.
    """
    number = checked_number(name, value)
    if not 0 < number < math.inf:
        raise ArgumentError(
            f"`{name}` must be a finite number above 0. Received: {name}={value!r}."
        )
    return number


def checked_scale(name: str, value: Any) -> float:
    """Returns `value` as a float that can be a loss scale.

    Args:
        name: The argument's name, for the message.
        value: The value to check.

    Raises:
        ArgumentError: If it is not a number in [2**-126, 2**126].
    """
    number = checked_number(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ArgumentError(
            f"`{name}` must be a positive number from 2**-126 to 2**126. Received: "
            f"{name}={value!r}. It and its reciprocal must be normal float32 numbers."
        )
    return number


def checked_interval(name: str, value: Any) -> int:
    """Returns `value` as an int that can be a growth interval.

    Raises:
        ArgumentError: If it is not a whole number from 1 to 2**31 - 1.
    """
    try:
        # A whole number may be written as a float, such as 2e3.
        is_whole = getattr(value, "is_integer", bool)
        number = int(value) if is_whole() else operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= LONGEST_INTERVAL:
        raise ArgumentError(
            f"`{name}` must be an integer number of steps from 1 to 2**31 - 1. "
            f"Received: {name}={value!r} of type {type(value).__name__}."
        )
    return number


def checked_truth(name: str, value: Any, error: type[LossScaleError] = ArgumentError) -> bool:
    """Returns `value` as a bool; accepts NumPy's booleans too.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        error: The class of the error.

    Raises:
        LossScaleError: If it is neither True nor False.
    """
    # 1 and 0 are not accepted.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(
        f"`{name}` must be True or False. Received: {name}={value!r} of type "
        f"{type(value).__name__}."
    )


SETTING_OF = {
    word: setting
    for setting, words in {
        # TensorFlow; Apex and fairseq; DeepSpeed and Megatron; jmp.
        "initial_scale": "init_scale initial_loss_scale scale",
        "growth_interval": "dynamic_growth_steps increment_period scale_window period",
        "growth_factor": "multiplier scale_factor factor",
        "backoff_factor": "",
        "min_scale": "min_loss_scale",
        "max_scale": "max_loss_scale",
        "overflows_before_backoff": "hysteresis delayed_shift",
        "clip_norm": "max_norm max_grad_norm gradient_clip_val",
    }.items()
    for word in (setting, *words.split())
}
"""A keyword of another library, and the setting of `DynamicScale` (or `clip_norm`) it means."""

_FIXED = "rule=lossscale.FixedScale({value!r}) for a fixed scale; a dynamic one needs no argument"
_ON_INNER = "{name}={value!r} on the `inner_optimizer`"
_OF_INNER = (
    *("learning_rate", "lr", "momentum", "weight_decay", "clipnorm", "clipvalue"),
    *("global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
    "gradient_accumulation_steps",
)
KEYWORD_HINTS = {
    **dict.fromkeys(("loss_scale", "static_loss_scale"), _FIXED),
    "enabled": "rule=lossscale.FixedScale(1.0) for no loss scaling; it is enabled otherwise",
    "skip_nonfinite": "rule=lossscale.FixedScale(scale, skip_nonfinite={value!r})",
    **dict.fromkeys(_OF_INNER, _ON_INNER),
}
"""A keyword of another library, and what to write instead, for functions that take a `rule`."""


def unknown_keywords(
    owner: str, given: Mapping[str, Any], taken: Sequence[str], instead: Mapping[str, str]
) -> str:
    """Returns the message about keywords that a function does not have.

    Args:
        owner: The name of the function.
        given: All keywords of the call, with their values.
        taken: The keywords of the function.
        instead: The replacement of some keywords; a format string with `name` and `value`.

    Examples:
        >>> unknown_keywords("f", {"period": 9, "factor": 2}, ["rule"], {})
        'f has no arguments: `period`, `factor`: write \
rule=lossscale.DynamicScale(growth_interval=9, growth_factor=2). It takes rule.'
    """
    unknown = {name: value for name, value in given.items() if name not in taken}
    takes_rule = "rule" in taken
    answers = KEYWORD_HINTS | dict(instead) if takes_rule else instead
    written = []
    settings = {}
    for name, value in unknown.items():
        setting = SETTING_OF.get(name, name)
        if answer := answers.get(setting):
            written.append(answer.format(name=name, value=value))
        elif setting in taken or (takes_rule and setting in SETTING_OF and setting != "clip_norm"):
            settings[setting] = value
    if settings.keys() - set(taken):
        # The rule needs all settings, including those passed under their right names.
        right = {
            SETTING_OF[name]: given[name] for name in given if name in SETTING_OF.keys() & taken
        }
        settings = right | settings
        instead_of = f" without {', '.join(right)}" if right else ""
        written.append(f"rule=lossscale.DynamicScale({_joined(settings)}){instead_of}")
    elif settings:
        written.append(_joined(settings))
    names = ", ".join(f"`{name}`" for name in unknown)
    named = f"argument {names}" if len(unknown) == 1 else f"arguments: {names}"
    answer = f": write {', and '.join(written)}" if written else ""
    return f"{owner} has no {named}{answer}. It takes {', '.join(taken)}."


def _joined(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def checks_keywords(
    owner: str,
    instead: Mapping[str, str] = MappingProxyType({}),
    error: type[LossScaleError] = ArgumentTypeError,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function so that its error for an unknown keyword has the one to write.

    Args:
        owner: The name that the user calls.
        instead: As for `unknown_keywords`.
        error: The class of the error.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        taken = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
        ]

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if any(name not in taken for name in kwargs):
                raise error(unknown_keywords(owner, kwargs, taken, instead))
            return function(*args, **kwargs)

        return checked

    return decorated


def class_checks_keywords(
    owner: str, instead: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[_T]], type[_T]]:
    """Decorates the constructor of a class as `checks_keywords` does.

    Args:
        owner: The name that the user calls.
        instead: As for `unknown_keywords`.
    """

    def changed(cls: type[_T]) -> type[_T]:
        cls.__init__ = checks_keywords(owner, instead)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return changed

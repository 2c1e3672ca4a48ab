"""The state dictionaries of gradient scalers: PyTorch's, and those that Apex wrote."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from lossscale.checks import LONGEST_INTERVAL
from lossscale.errors import ArgumentError, LossScaleWarning, StateDictError
from lossscale.rules import DynamicScale, ScaleRule, ScaleState

STEPS_SKIPPED = "steps_skipped"
MORE = "rule_state"

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


def setting(rule: ScaleRule, name: str) -> Any:
    """The growth factor, backoff factor or growth interval of a rule.

    A rule that has none does not move the scale: then the factor is 1, and the interval the
    longest.
    """
    return getattr(rule, name, LONGEST_INTERVAL if name == "growth_interval" else 1.0)


def with_settings(rule: ScaleRule, **settings: Any) -> ScaleRule:
    """A rule with other factors or another interval.

    Raises:
        ArgumentError: If the rule has no such setting, or the value cannot be used. It is a
            `ValueError`.
    """
    missing = [name for name in settings if not hasattr(rule, name)]
    if missing or not isinstance(rule, DynamicScale):
        raise ArgumentError(
            f"The rule {rule!r} has no {', '.join(missing or settings)} to set. Make the scaler "
            "with another `rule`."
        )
    return dataclasses.replace(rule, **settings)


def written(rule: ScaleRule, state: ScaleState, scale: float, steps_skipped: int) -> dict[str, Any]:
    """A state dictionary that `torch.amp.GradScaler` reads too; Python numbers only."""
    found = {
        "scale": scale,
        **{name: setting(rule, name) for name in _SETTINGS},
        "_growth_tracker": getattr(state, "good_steps", 0),
        # PyTorch's class leaves alone what it does not know.
        STEPS_SKIPPED: steps_skipped,
    }
    if state._fields != ScaleState._fields:
        found[MORE] = dict(state._asdict())
    return found


class Read(NamedTuple):
    """What a state dictionary says.

    Attributes:
        rule: The rule with the factors and the interval of the dictionary.
        state: The state, brought into the range of that rule.
        steps_skipped: Or None if it does not say.
    """

    rule: ScaleRule
    state: ScaleState
    steps_skipped: int | None


def read(found: Any, rule: ScaleRule, state: ScaleState) -> Read:
    """Reads a state dictionary for a scaler with a rule and a state.

    Args:
        found: PyTorch's dictionary, or a part of it; that of an Apex loss scaler, or of
            `amp.state_dict()`.
        rule: The rule of the scaler that reads it. Factors and interval that it has are replaced.
        state: The state of that scaler; what the dictionary does not say stays.

    Raises:
        StateDictError: If it is empty or not of these kinds. It is a `RuntimeError` and a
            `KeyError`.
        ArgumentError: If a value in it cannot be used. It is a `ValueError`.

    Example:
        >>> from lossscale import DynamicScale
        >>> rule = DynamicScale()
        >>> read({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}}, rule, rule.init()).state
        ScaleState(scale=8.0, good_steps=3)
    """
    values = _normal(found)
    # A rule that has no such settings keeps to itself.
    if isinstance(rule, DynamicScale):
        rule = with_settings(rule, **{n: values[n] for n in _SETTINGS if n in values})
    kept = values.get(MORE, {})
    fields = {name: kept[name] for name in state._fields if name in kept}
    # The number in the code of a fixed scale stands.
    if "scale" in values and rule.moves:
        fields["scale"] = _number("scale", values["scale"])
    if "_growth_tracker" in values and "good_steps" in state._fields:
        fields["good_steps"] = _whole("_growth_tracker", values["_growth_tracker"])
    restored = before_growth(rule, rule.restored(state._replace(**fields)))
    if "scale" in fields and restored.scale != fields["scale"]:
        warnings.warn(
            f"The loss scale {fields['scale']!r} of the state dictionary is not in the range of "
            f"{rule!r}; {restored.scale!r} is used.",
            LossScaleWarning,
            stacklevel=3,
        )
    skipped = values.get(STEPS_SKIPPED)
    return Read(rule, restored, None if skipped is None else _whole(STEPS_SKIPPED, skipped))


def before_growth(rule: ScaleRule, state: ScaleState) -> ScaleState:
    """The state with fewer finite steps than the interval, as PyTorch's class needs to grow."""
    if not isinstance(rule, DynamicScale):
        return state
    return state._replace(good_steps=min(state.good_steps, rule.growth_interval - 1))


def _normal(found: Any) -> dict[str, Any]:
    """The dictionary by PyTorch's names."""
    if not isinstance(found, Mapping) or not found:
        raise StateDictError(
            "A scaler's state is a dictionary, as `state_dict()` returns it. Received: "
            f"{found!r}. An empty one was saved by a scaler that was disabled; make this one with "
            "enabled=False, or do not load it."
        )
    scalers = [key for key in found if str(key).startswith("loss_scaler")]
    if len(scalers) > 1:
        raise StateDictError(
            f"This dictionary of Apex holds {len(scalers)} loss scalers, and a GradScaler has one "
            f"scale. Load one of them: {', '.join(f'state[{key!r}]' for key in scalers)}."
        )
    found = found[scalers[0]] if scalers else found
    if "loss_scale" in found and "unskipped" in found:
        return {"scale": found["loss_scale"], "_growth_tracker": found["unskipped"]}
    if "scale" not in found and "_growth_tracker" not in found:
        raise StateDictError(
            "This is no state of a gradient scaler: it has neither 'scale' nor "
            f"'_growth_tracker'. Its keys: {', '.join(map(repr, found))}."
        )
    return dict(found)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise StateDictError(
            f"{name!r} of a scaler's state must be a number. Received: {value!r}."
        ) from None


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    return int(number) if math.isfinite(number) else 0

"""State dictionaries of other gradient scalers: Apex, Megatron, DeepSpeed, and the wrapper's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lossscale.errors import StateDictError
from lossscale.packages import warn
from lossscale.torch.scale import saved_as


def as_torchs(found: Any) -> dict[str, Any]:
    """Renames the keys of any gradient scaler's dictionary to PyTorch's; warns of lost values."""
    if not isinstance(found, Mapping) or not found:
        raise StateDictError(
            "A scaler's state must be a dictionary, as state_dict() returns it. Received: "
            f"{found!r}. A disabled scaler saves an empty one: make this scaler with "
            "enabled=False, or do not load it."
        )
    scalers = [key for key in found if str(key).startswith("loss_scaler")]
    if len(scalers) > 1:
        raise StateDictError(
            f"This state of Apex has {len(scalers)} loss scalers, and a GradScaler has one scale. "
            f"Load one of them: {', '.join(f'state[{key!r}]' for key in scalers)}."
        )
    found = found[scalers[0]] if scalers else found
    # DeepSpeed pickles the scaler object.
    found = found if isinstance(found, Mapping) else getattr(found, "__dict__", {"": found})
    lost = {name: found[name] for name in _HYSTERESIS if found.get(name, 1) != 1}
    if lost:
        warn(
            "The scaler that wrote this state has hysteresis "
            f"({', '.join(f'{name}={value}' for name, value in lost.items())}), which is not "
            "loaded: its scale falls only after some overflows. A rule that allows one is "
            "rule=lossscale.DynamicScale(overflows_before_backoff=2)."
        )
    if "cur_scale" in found:
        return _of_deepspeed(found)
    renamed = next((names for names in _OF_OTHERS if set(names) <= set(found)), None)
    if renamed is not None:
        return {new: found[old] for old, new in zip(renamed, _NAMES, strict=True)}
    if "scale" not in found and "_growth_tracker" not in found:
        raise StateDictError(
            "This is not the state of a gradient scaler: it has neither 'scale' nor "
            f"'_growth_tracker'. Its keys: {', '.join(map(repr, found))}."
        )
    return dict(found)


_NAMES = "scale", "_growth_tracker"
_OF_OTHERS = (
    # Apex, Megatron, and the wrapper of this library.
    ("loss_scale", "unskipped"),
    ("scale", "growth_tracker"),
    (saved_as("scale"), saved_as("good_steps")),
)
_HYSTERESIS = "hysteresis_tracker", "delayed_shift"


def _of_deepspeed(found: Mapping[str, Any]) -> dict[str, Any]:
    values = {"scale": found["cur_scale"]}
    if "scale_window" in found:
        window, factor = found["scale_window"], found["scale_factor"]
        values["growth_interval"], values["growth_factor"] = window, factor
        values["backoff_factor"] = 1.0 / factor
        values["_growth_tracker"] = (found["cur_iter"] - found["last_overflow_iter"] - 1) % window
    return values


def number_of(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise StateDictError(
            f"{name!r} of a scaler's state must be a number. Received: {value!r}."
        ) from None


def whole_number_of(name: str, value: Any) -> int:
    number = number_of(name, value)
    return int(number) if math.isfinite(number) else 0

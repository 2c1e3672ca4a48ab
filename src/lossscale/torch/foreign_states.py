"""State dictionaries of other gradient scalers: Apex, Megatron, DeepSpeed, and the wrapper's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lossscale.errors import StateDictError
from lossscale.packages import warn
from lossscale.torch.scale import saved_as


def as_torchs(saved: object) -> dict[str, Any]:
    """Renames the keys of any gradient scaler's dictionary to PyTorch's; warns of lost values."""
    if not isinstance(saved, Mapping) or not saved:
        raise StateDictError(
            "A scaler's state must be a dictionary, as state_dict() returns it. Received: "
            f"{saved!r}. A disabled scaler saves an empty one: make this scaler with "
            "enabled=False, or do not load it."
        )
    scalers = [key for key in saved if str(key).startswith("loss_scaler")]
    if len(scalers) > 1:
        raise StateDictError(
            f"This state of Apex has {len(scalers)} loss scalers, and a GradScaler has one scale. "
            f"Load one of them: {', '.join(f'state[{key!r}]' for key in scalers)}."
        )
    saved = saved[scalers[0]] if scalers else saved
    # DeepSpeed pickles the scaler object.
    saved = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {"": saved})
    lost = {name: saved[name] for name in _HYSTERESIS if saved.get(name, 1) != 1}
    if lost:
        warn(
            "The scaler that wrote this state has hysteresis "
            f"({', '.join(f'{name}={value}' for name, value in lost.items())}), which is not "
            "loaded: its scale falls only after some overflows. A rule that allows one is "
            "rule=lossscale.DynamicScale(overflows_before_backoff=2)."
        )
    if "cur_scale" in saved:
        return _of_deepspeed(saved)
    renamed = next((names for names in _OF_OTHERS if set(names) <= set(saved)), None)
    if renamed is not None:
        return {new: saved[old] for old, new in zip(renamed, _NAMES, strict=True)}
    if "scale" not in saved and "_growth_tracker" not in saved:
        raise StateDictError(
            "This is not the state of a gradient scaler: it has neither 'scale' nor "
            f"'_growth_tracker'. Its keys: {', '.join(map(repr, saved))}."
        )
    return dict(saved)


_NAMES = "scale", "_growth_tracker"
_OF_OTHERS = (
    # Apex, Megatron, and the wrapper of this library.
    ("loss_scale", "unskipped"),
    ("scale", "growth_tracker"),
    (saved_as("scale"), saved_as("good_steps")),
)
_HYSTERESIS = "hysteresis_tracker", "delayed_shift"


def _of_deepspeed(saved: Mapping[str, Any]) -> dict[str, Any]:
    values = {"scale": saved["cur_scale"]}
    if "scale_window" in saved:
        window, factor = saved["scale_window"], saved["scale_factor"]
        values["growth_interval"], values["growth_factor"] = window, factor
        values["backoff_factor"] = 1.0 / factor
        values["_growth_tracker"] = (saved["cur_iter"] - saved["last_overflow_iter"] - 1) % window
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

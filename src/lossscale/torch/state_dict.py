"""State dictionaries of the wrapper and of gradient scalers.

`torch.distributed.checkpoint` saves only `state` and `param_groups` of an optimizer's state
dictionary. So the values of the loss scale are saved in the first group. The optimizer's own groups
never keep them.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lossscale.checks import LONGEST_INTERVAL
from lossscale.errors import ArgumentError, StateDictError
from lossscale.packages import warn
from lossscale.rules import DynamicScale, ScaleRule, ScaleState
from lossscale.torch.scale import Counts, LossScale

if TYPE_CHECKING:
    from lossscale.torch.optimizer import LossScaleOptimizer

_PREFIX = "loss_scale"
_OVERFLOWS = f"{_PREFIX}_overflows"
"""The key of a count that only some rules save. The others ignore it in a dictionary."""
_OF_A_SCALER = {f: f for f in ("scale", "steps_skipped")} | {"_growth_tracker": "good_steps"}
"""The keys in a gradient scaler's dictionary, and what they stand for."""

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


# --- Of the wrapper ---------------------------------------------------------------------------


def numbers_of(scale: LossScale) -> dict[str, Any]:
    """Returns the values of a loss scale by their keys, Python numbers."""
    values = scale.numbers()
    return {name: values[meant] for name, meant in scale.names.items()}


def _names(scale: LossScale) -> set[str]:
    """The keys in a saved parameter group that may hold a value of the loss scale."""
    return {*scale.names, _OVERFLOWS}


def with_numbers(saved: Mapping[str, Any], scale: LossScale) -> dict[str, Any]:
    """Adds the values of a loss scale to the state dictionary of its optimizer.

    Args:
        saved: The state dictionary.
        scale: The loss scale.
    """
    numbers = numbers_of(scale)
    if not saved.get("param_groups"):
        # The optimizer writes a format of its own.
        return {**saved, _PREFIX: numbers}
    first, *others = saved["param_groups"]
    return {**saved, "param_groups": [{**first, **numbers}, *others]}


def without_numbers(
    state_dict: object, scale: LossScale, inner: Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits what `with_numbers` returned: the optimizer's dictionary, and the checked values.

    Raises:
        StateDictError: If it is not the state of an optimizer.
        ArgumentError: If a value is not a number.
    """
    known = state_dict if isinstance(state_dict, Mapping) else {}
    # The optimizer has a format of its own, in which the values have a key of theirs.
    if isinstance(known.get(_PREFIX), Mapping):
        of_inner = {name: value for name, value in known.items() if name != _PREFIX}
        return of_inner, checked_numbers(known[_PREFIX], scale.names)
    if not known.get("param_groups"):
        # A state of such an optimizer that was saved without the values.
        if known and "param_groups" not in inner.state_dict():
            return dict(known), {}
        keys = list(known) if isinstance(state_dict, Mapping) else state_dict
        raise StateDictError(
            "An optimizer's state must be a dictionary with 'state' and 'param_groups', as "
            f"state_dict() returns it. Received: {reprlib.repr(keys)}. From a checkpoint with "
            "several parts, load the optimizer's."
        )
    groups = known["param_groups"]
    without = [{k: v for k, v in group.items() if k not in _names(scale)} for group in groups]
    return {**known, "param_groups": without}, checked_numbers(groups[0], scale.names)


def has_numbers(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether parameter groups have the values of a loss scale."""
    return any(_PREFIX in group for group in groups)


def loaded_numbers(state_dict: Mapping[str, Any], scale: LossScale) -> dict[str, float]:
    """The checked values in a state that an optimizer itself loads; empty if there are none."""
    groups = [group for group in state_dict.get("param_groups", ()) if has_numbers([group])]
    return checked_numbers(groups[0], scale.names) if groups else {}


def watch_loads(inner: Optimizer, wrapper: LossScaleOptimizer) -> None:
    """Has a wrapper, while it lives, check and take what its inner optimizer itself loads."""
    # An object with the interface of an optimizer may have no hooks, and one of ours forwards them.
    if "_optimizer_load_state_dict_post_hooks" not in vars(inner):
        return
    reference = weakref.ref(wrapper)

    def check(_: Optimizer, state_dict: dict[str, Any]) -> None:
        if (owner := reference()) is not None:
            owner._check_load(state_dict)

    def take(optimizer: Optimizer) -> None:
        # The one that has loaded: a `MasterWeights` around it is in the middle of its own load.
        if (owner := reference()) is not None:
            owner._take_loaded(optimizer, by_hook=True)

    inner.register_load_state_dict_pre_hook(check)
    inner.register_load_state_dict_post_hook(take)


def take_numbers(scale: LossScale, inner: Optimizer) -> dict[str, float]:
    """Removes and returns the values from an optimizer that has loaded the wrapper's state.

    Raises:
        ArgumentError: If a group has a key of the user's by the name of one of these values.
    """
    together = {_PREFIX, f"{_PREFIX}_iterations", f"{_PREFIX}_steps_skipped"}
    found = [group for group in inner.param_groups if group.keys() & _names(scale)]
    for group in found:
        taken = group.keys() & _names(scale)
        if not together <= taken:
            raise ArgumentError(
                f"A parameter group has the keys {sorted(taken)}. A state dictionary has the loss "
                "scale by these. Give them other names."
            )
    # Several optimizers may each have loaded a state; they share the first scale.
    numbers = checked_numbers(found[0], scale.names) if found else {}
    for group in found:
        for name in _names(scale):
            group.pop(name, None)
    return numbers


def checked_numbers(saved: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The numbers of a loss scale in a dictionary, by what they stand for.

    Args:
        saved: The dictionary; other keys are ignored.
        names: What each key stands for.

    Raises:
        ArgumentError: If one of them is not a number.
    """
    checked = {}
    for name, meant in names.items():
        if saved.get(name) is None:
            continue
        try:
            checked[meant] = float(saved[name])
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise ArgumentError(
                f"`{name}` in the state must be a number. Received: {saved[name]!r} of type "
                f"{type(saved[name]).__name__}."
            ) from None
        if meant != "scale" and not math.isfinite(checked[meant]):
            raise ArgumentError(f"`{name}` in the state must be finite. Received: {saved[name]!r}.")
    return checked


def restore(scale: LossScale, numbers: dict[str, float]) -> None:
    """Sets checked numbers, by what they stand for; values that are missing stay."""
    if not numbers:
        return
    values = scale.numbers()
    now = type(scale.first)(*(values[field] for field in scale.first._fields))
    state, values = _restored(scale.rule, now, numbers), {**values, **numbers}
    made, skipped = (max(int(values[name]), 0) for name in ("iterations", "steps_skipped"))
    scale.restore(state, Counts(made, skipped, bool(numbers.get("last_step_skipped"))))


def _restored(rule: ScaleRule, state: ScaleState, saved: Mapping[str, Any]) -> ScaleState:
    """Returns a state with saved numbers, moved into the range of the rule.

    Args:
        rule: The rule.
        state: A state of the rule, for values that were not saved.
        saved: Numbers by the fields of the state; other keys are ignored.
    """
    if "scale" in saved and "overflows" in state._fields:
        # A scale that was saved without a count of overflows begins with none.
        saved = {"overflows": 0, **saved}
    values = (type(now)(saved.get(field, now)) for field, now in state._asdict().items())
    asked = type(state)(*values)
    restored: ScaleState = rule.restored(asked)
    if rule.is_dynamic and restored.scale != asked.scale:
        warn(
            f"The saved loss scale, {asked.scale!r}, is outside the range of {rule}. Training "
            f"continues with {restored.scale!r}."
        )
    return restored


class LossScaleState:
    """The state of a loss scale by itself, as `torch.distributed.checkpoint` takes it.

    Args:
        scale: The loss scale.
    """

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers by name: Python numbers."""
        return numbers_of(self._scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this or of a gradient scaler returned.

        Raises:
            StateDictError: If it is of another kind. Then nothing is changed.
            ArgumentError: If one of them is not a number. Then nothing is changed.
        """
        is_own = isinstance(state_dict, Mapping) and state_dict.keys() & self._scale.names
        if is_own and "unskipped" not in state_dict:
            numbers = checked_numbers(state_dict, self._scale.names)
        else:
            scaler, rule = checked_scaler_state(state_dict), self._scale.rule
            numbers = checked_numbers(scaler, _OF_A_SCALER)
            settings = {name: scaler[name] for name in _SETTINGS if name in scaler}
            others = {n: value for n, value in settings.items() if value != setting(rule, n)}
            if others:
                warn(
                    f"The optimizer keeps its rule, {rule}, although the state dictionary has "
                    f"{', '.join(f'{n}={value!r}' for n, value in others.items())}. To train with "
                    "these, make the optimizer with rule=lossscale.DynamicScale(...)."
                )
        restore(self._scale, numbers)

    def scaler_state_dict(self) -> dict[str, Any]:
        """Returns the state in the format of `torch.amp.GradScaler`: Python numbers."""
        rule, numbers = self._scale.rule, self._scale.numbers()
        # Without factors, PyTorch's class would skip and never lower the scale.
        has_none = rule.checks_gradients and not isinstance(rule, DynamicScale)
        settings = DynamicScale() if has_none else rule
        return {
            "scale": float(numbers["scale"]),
            **{name: setting(settings, name) for name in _SETTINGS},
            "_growth_tracker": numbers.get("good_steps", 0),
            # PyTorch's class ignores this key.
            "steps_skipped": numbers["steps_skipped"],
        }


# --- Of gradient scalers ----------------------------------------------------------------------


def setting(rule: ScaleRule, name: str) -> Any:
    """Returns the growth factor, backoff factor or growth interval of a rule.

    For a rule without them the scale is fixed: the factor is 1, and the interval the longest.
    """
    return getattr(rule, name, LONGEST_INTERVAL if name == "growth_interval" else 1.0)


def read_scaler_state(
    saved: object, rule: DynamicScale, state: ScaleState
) -> tuple[DynamicScale, ScaleState, int | None]:
    """Reads a state dictionary for a scaler with a rule and a state.

    Args:
        saved: PyTorch's dictionary, or a part of it; other keys are ignored, as by PyTorch's class.
        rule: The rule of the scaler that reads it.
        state: The state of that scaler, for values that the dictionary does not have.

    Returns:
        The rule with the factors and the interval of the dictionary; the state, moved into the
        range of that rule; the number of skipped steps, None if it was not saved.

    Raises:
        StateDictError: If it is empty or of another kind.
        ArgumentError: If a value in it cannot be used.

    Examples:
        >>> from lossscale import DynamicScale
        >>> rule, saved = DynamicScale(), {"scale": 8.0, "_growth_tracker": 3}
        >>> _, state, _ = read_scaler_state(saved, rule, rule.init())
        >>> state
        ScaleState(scale=8.0, good_steps=3)
    """
    values = checked_scaler_state(saved)
    rule = dataclasses.replace(rule, **{n: values[n] for n in _SETTINGS if n in values})
    numbers = checked_numbers(values, _OF_A_SCALER)
    skipped = numbers.get("steps_skipped")
    return rule, _restored(rule, state, numbers), None if skipped is None else int(skipped)


def checked_scaler_state(saved: object) -> dict[str, Any]:
    """Returns a gradient scaler's dictionary.

    Raises:
        StateDictError: If it is empty, or that of another kind of scaler.
    """
    if not isinstance(saved, Mapping) or not saved:
        raise StateDictError(
            "A scaler's state must be a dictionary, as state_dict() returns it. Received: "
            f"{saved!r}. A disabled scaler saves an empty one: make this scaler with "
            "enabled=False, or do not load it."
        )
    # Megatron has the first key, and a count that would be lost.
    if "growth_tracker" in saved or not saved.keys() & {"scale", "_growth_tracker"}:
        raise StateDictError(
            "This is not the state of torch.amp.GradScaler: it must have 'scale' or "
            f"'_growth_tracker'. Received the keys {', '.join(map(repr, saved))}. From another "
            "scaler, load {'scale': its scale, '_growth_tracker': its finite steps}."
        )
    return dict(saved)

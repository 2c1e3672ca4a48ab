"""The scale of a gradient scaler: its rule, its two tensors, its files.

The host knows the scale, and two tensors on a device show it. Compiled code, CUDA graphs and other
libraries hold on to the tensors, so they are changed in place and never replaced. Others also
write to them; PyTorch counts what is written to a tensor, so the device is asked again then, and
only then.
"""

from __future__ import annotations

from typing import Any

import torch

from lossscale.errors import CallOrderError
from lossscale.rules import ScaleRule, ScaleState, Seen, host_can_update, updates_on_host
from lossscale.torch.grad_scaler import files as scaler_files
from lossscale.torch.grad_scaler.arguments import as_of_a_scaler


def shown(value: float, dtype: Any, device: Any) -> Any:
    """A scalar tensor that can be changed in place, also if made under `torch.inference_mode`."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def moved(rule: ScaleRule, state: ScaleState, seen: Seen) -> ScaleState:
    """The state of a rule after a step, as Python numbers.

    Args:
        rule: The rule.
        state: The state before, as Python numbers.
        seen: What was seen: `seen.finite` is a bool, the rest are float32 tensors of the CPU.

    Example:
        >>> rule = lossscale.DynamicScale(initial_scale=8)
        >>> moved(rule, rule.init(), Seen(False))
        ScaleState(scale=4.0, good_steps=0)
    """
    if host_can_update(rule):
        return state._replace(**updates_on_host(rule, state, seen.finite))
    # Numbers of Python would be rounded otherwise than tensors.
    tensors = [
        torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float32)
        for value in state
    ]
    seen = seen._replace(finite=torch.tensor(seen.finite))
    after = rule.update(type(state)(*tensors), seen, xp=torch)
    numbers = [field.item() if isinstance(field, torch.Tensor) else field for field in after]
    return type(state)(*numbers)


class ScaleOfScaler(torch.amp.GradScaler):
    """The part of a gradient scaler that is about its scale."""

    # What compiled code and other libraries read, and may write.
    _scale: Any
    _growth_tracker: Any
    _init_scale: float
    _init_growth_tracker: int
    _steps_skipped: int

    def _start(self, rule: ScaleRule) -> None:
        self._rule = rule
        self._state: ScaleState = rule.init()
        self._init_scale = self._number = float(rule.loss_scale(self._state))
        self._init_growth_tracker = 0
        self._scale = self._growth_tracker = None
        self._left: tuple[Any, int, Any, int] | None = None
        self._steps_skipped = 0

    @property
    def rule(self) -> ScaleRule:
        """How the scale moves."""
        return self._rule

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows, dimensionless."""
        return float(scaler_files.setting(self._rule, "growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor, dimensionless, above 1."""
        self._set(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after an overflow, dimensionless."""
        return float(scaler_files.setting(self._rule, "backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor, dimensionless, between 0 and 1."""
        self._set(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """How many finite steps in a row raise the scale, in steps."""
        return int(scaler_files.setting(self._rule, "growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval, in steps; a shorter one takes effect on the next step."""
        self._set(growth_interval=new_interval)

    def _set(self, **settings: Any) -> None:
        with as_of_a_scaler():
            self._rule = scaler_files.with_settings(self._rule, **settings)
        self._put(scaler_files.before_growth(self._rule, self._read()))

    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)

    def get_scale(self) -> float:
        """The loss scale, dimensionless; 1 if disabled. Waits for no device."""
        if not self._enabled:
            return 1.0
        self._read()
        return self._number

    def _get_growth_tracker(self) -> int:
        return getattr(self._read(), "good_steps", 0) if self._enabled else 0

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        # Accelerate calls it after it loads a state, whether or not there are tensors.
        if self._scale is None or self._growth_tracker is None:
            self._scale = shown(self._init_scale, torch.float32, dev)
            self._growth_tracker = shown(self._init_growth_tracker, torch.int32, dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Any, Any]:
        if self._scale is None or self._growth_tracker is None:
            raise CallOrderError(
                f"{funcname} was called before anything was scaled. Call "
                "scaler.scale(loss).backward() first."
            )
        return self._scale, self._growth_tracker

    def _read(self) -> ScaleState:
        """The state of the rule, as Python numbers."""
        scale, tracker, left = self._scale, self._growth_tracker, self._left
        if scale is None or tracker is None:
            self._take(self._init_scale, self._init_growth_tracker)
        elif not (
            left is not None
            and left[0] is scale
            and left[1] == scale._version
            and left[2] is tracker
            and left[3] == tracker._version
        ):
            self._take(scale.item(), tracker.item())
            self._leave()
        return self._state

    def _leave(self) -> None:
        scale, tracker = self._scale, self._growth_tracker
        self._left = scale, scale._version, tracker, tracker._version

    def _take(self, scale: float, good_steps: int) -> None:
        if scale != self._number:
            self._number, self._state = scale, self._state._replace(scale=scale)
        if good_steps != getattr(self._state, "good_steps", good_steps):
            self._state = self._state._replace(good_steps=good_steps)

    def _put(self, state: ScaleState) -> None:
        """Writes a state where it differs from what is shown."""
        before, number = self._read(), float(self._rule.loss_scale(state))
        good_steps = getattr(state, "good_steps", 0)
        if self._scale is not None:
            # A NaN is unequal to itself, and written again.
            if number != self._number:
                self._scale.fill_(number)
            if good_steps != getattr(before, "good_steps", 0):
                self._growth_tracker.fill_(good_steps)
            self._leave()
        self._state, self._number = state, number
        self._init_scale, self._init_growth_tracker = number, good_steps

    def _move(self, seen: Seen) -> None:
        """Takes the scale one step on."""
        self._put(moved(self._rule, self._read(), seen))

    def state_dict(self) -> dict[str, Any]:
        """The state as Python numbers, which PyTorch's own scaler loads too; empty if disabled."""
        if not self._enabled:
            return {}
        return scaler_files.written(self._rule, self._read(), self._number, self._steps_skipped)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state of this class, of PyTorch's or of Apex; does nothing if disabled.

        Args:
            state_dict: What `state_dict()` returned; what it does not say stays. Of Apex that of a
                loss scaler, or `amp.state_dict()`. A scale outside of the rule's range is brought
                into it, with a warning.

        Raises:
            StateDictError: If it is empty or not of these kinds; nothing changes then. It is a
                `RuntimeError` and a `KeyError`.
            ScalerArgumentError: If a factor in it cannot be used. It is a `ValueError`.
        """
        if not self._enabled:
            return
        with as_of_a_scaler():
            read = scaler_files.read(state_dict, self._rule, self._read())
        self._rule = read.rule
        self._put(read.state)
        if read.steps_skipped is not None:
            self._steps_skipped = read.steps_skipped

"""`GradScaler`: PyTorch's class, with its defects mended.

Everything that PyTorch's class calls on itself is called as it calls it. Nothing is known of losses
and gradients: `scale` multiplies, `unscale_` and `step` divide.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lossscale.checks import SMALLEST_SCALE, checked_number, checked_truth
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    ArgumentTypeError,
    CallOrderError,
    ScalerArgumentError,
)
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.rules import DynamicScale, ScaleState
from lossscale.torch import fused, gradients, ranks
from lossscale.torch import state_dict as state_dicts
from lossscale.torch.observers import Decided, FloorWarning, Observers, SkippedStepHook, Stepped
from lossscale.torch.optimizer_list import check_can_step, parts_of
from lossscale.torch.ranks import ParameterInfo, groups_of, parameters_of
from lossscale.torch.scale import FirstSteps, Flag
from lossscale.torch.scaling import is_captured, mapped, read, read_all, scalar, scaled, uncompiled

Losses = TypeVar("Losses")

DEFAULTS = DynamicScale(initial_scale=2.0**16, min_scale=SMALLEST_SCALE)
"""The defaults of PyTorch's scaler, and the lowest safe scale."""

_OF_ONE_SCALER = frozenset({"_records", "_observers", "_last_skipped"})
"""Attributes that a copy does not share."""

_MOST_FLAGS = 100
"""After how many flags their sum replaces them."""


class _SkipCount:
    """Number of steps and of skipped steps; the host waits only when it reads them.

    Args:
        skipped: Number of skipped steps so far.
    """

    def __init__(self, skipped: int = 0) -> None:
        self._made, self._skipped = 0, skipped
        # Flags that were not read yet, and on the device of a CUDA graph the numbers of steps and
        # of skipped steps in its replays.
        self._flags: list[Tensor] = []
        self._replayed: Tensor | None = None

    def add(self, flag: Flag) -> None:
        """Counts a step.

        Args:
            flag: Whether it is skipped: a bool, or a float32 scalar tensor, 1 or 0.
        """
        if isinstance(flag, bool):
            self._made, self._skipped = self._made + 1, self._skipped + flag
            return
        if is_captured(flag):
            # Each replay counts. What a graph allocates would be 0 again at each.
            if self._replayed is not None:
                self._replayed += torch.stack([torch.ones_like(flag), flag])
            return
        if flag.is_cuda and self._replayed is None:
            self._replayed = torch.zeros(2, device=flag.device)
        self._made += 1
        self._flags.append(flag)
        if len(self._flags) > _MOST_FLAGS:
            self._flags = [self._sum()]

    def _sum(self) -> Tensor:
        return torch.stack([flag.to(self._flags[0].device) for flag in self._flags]).sum()

    def read(self) -> tuple[int, int]:
        """Returns the numbers of steps and of skipped steps; waits for the device once."""
        if self._replayed is not None:
            # A graph may have been replayed.
            if self._flags:
                self._replayed[1] += self._sum()
            made, skipped = map(int, self._replayed.tolist())
            self._replayed.zero_()
        else:
            made, skipped = 0, int(self._sum()) if self._flags else 0
        self._made, self._skipped, self._flags = self._made + made, self._skipped + skipped, []
        return self._made, self._skipped


class _OptimizerRecord:
    """A scaler's record of an optimizer: its parameters and the number of skipped steps."""

    def __init__(self, parameters: Sequence[Tensor], process_group: ranks.Groups) -> None:
        self.info, self.count = ParameterInfo(parameters, process_group), _SkipCount()
        self.first_steps = FirstSteps()


def _setting(name: str) -> Any:
    """A number of PyTorch's scaler, which is one of the rule, and is checked when it is set."""

    def put(self: Any, value: Any) -> None:
        with _as_of_a_scaler():
            self._rule = dataclasses.replace(self._rule, **{name: value})
        self._limit_growth_tracker()

    return property(lambda self: getattr(self._rule, name), put)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` without its defects: the same calls, numbers and files.

    ```
    scaler.scale(loss).backward()
    scaler.step(optimizer)      # unscales, checks, applies or skips
    scaler.update()             # moves the scale
    ```

    The scale and its reciprocal are always normal float32 numbers, so no sequence of overflows
    destroys the parameters.

    Args:
        device: The type of device, such as "cuda" or "cpu".
        init_scale: The first loss scale.
        growth_factor: Factor of the scale after `growth_interval` finite steps in a row, above 1.
        backoff_factor: Factor of the scale after a step with a gradient that is not finite, between
            0 and 1.
        growth_interval: Number of finite steps in a row that raise the scale, at least 1.
        enabled: If False, `scale` and `step` pass through, and the other methods do nothing. With
            "cuda" on a machine without CUDA it becomes False, with a warning.
        min_scale: The lowest loss scale; None stands for 2**-126.
        max_scale: The highest; None stands for 2**126.
        process_group: A `torch.distributed.ProcessGroup`, or a list of them, whose processes skip
            a step together, besides the groups of parameters that are DTensors. `[]` turns off
            the groups of DTensors too.

    Raises:
        ScalerArgumentError: If a value cannot be used.
        ArgumentTypeError: If `process_group` is something else.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> for factor in (1.0, torch.inf):
        ...     optimizer.zero_grad()
        ...     scaler.scale(weight.sum() * factor).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     print(weight.tolist(), scaler.get_scale(), scaler.last_step_skipped)
        [0.5] 8.0 False
        [0.5] 4.0 True

    Source: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    """

    # Where users find it, and so what pickles name.
    __module__ = "lossscale.torch"

    # Compiled code and other libraries read these, and may write to them.
    _scale: Tensor | None = None
    _growth_tracker: Tensor | None = None
    _per_optimizer_states: dict[int, dict[str, Any]]
    _init_growth_tracker = 0

    _least = 0.0
    """The scale is not below it, unless other code has written to it."""

    _scaled_since_update = False
    _last_skipped: Flag = False
    """Whether the last step was skipped."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = DEFAULTS.initial_scale,
        growth_factor: float = DEFAULTS.growth_factor,
        backoff_factor: float = DEFAULTS.backoff_factor,
        growth_interval: int = DEFAULTS.growth_interval,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        process_group: ranks.Groups = None,
    ) -> None:
        if issubclass(type(device), (int, float)):
            raise ScalerArgumentError(
                '`device` must be the name of a type of device, such as "cuda" or "cpu". The first '
                "argument of torch.cuda.amp.GradScaler is `init_scale`; here that is the second. "
                f"Received: device={device!r}."
            )
        with _as_of_a_scaler():
            made = DynamicScale(
                init_scale,
                growth_interval=growth_interval,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                min_scale=DEFAULTS.min_scale if min_scale is None else min_scale,
                max_scale=max_scale,
            )
        enabled = checked_truth("enabled", enabled, ScalerArgumentError)
        groups_of((), process_group)
        self._rule, self._process_group, self._skips = made, process_group, _SkipCount()
        numbers = made.growth_factor, made.backoff_factor, made.growth_interval
        super().__init__(device, made.initial_scale, *numbers, enabled)
        self._least = made.initial_scale
        self._forget()

    def _forget(self) -> None:
        """Forgets optimizers and observers, which a copy does not share."""
        self._records: dict[int, _OptimizerRecord] = {}
        self._observers = Observers()
        self._observers.add(FloorWarning())

    def _record_of(self, optimizer: Optimizer) -> _OptimizerRecord:
        key, parameters = id(optimizer), parameters_of(optimizer)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _OptimizerRecord(parameters, self._process_group)
            # With `__slots__` it cannot be referred to weakly.
            with contextlib.suppress(TypeError):
                weakref.finalize(optimizer, self._records.pop, key, None).atexit = False
        elif not record.info.is_of(parameters):
            record.info = ParameterInfo(parameters, self._process_group)
        return record

    # --- The calls of a training loop ---------------------------------------------------------

    def scale(self, outputs: Losses) -> Losses:
        """Multiplies losses by the scale, in float32 or wider.

        Args:
            outputs: A tensor of any shape, or a nest of dictionaries, sequences, named tuples and
                other iterables of tensors.

        Returns:
            The same nest with scaled tensors; an iterator for an iterable that is no sequence.

        Raises:
            ScalerArgumentError: If there is something else in it.
        """
        if not self._enabled:
            return outputs

        # Not PyTorch's method, which the compiler refuses to trace.
        def scaled_one(loss: Tensor) -> Tensor:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(loss.device)
            assert self._scale is not None
            return scaled(loss, self._scale)

        self._scaled_since_update = True
        result: Losses = mapped(scaled_one, outputs)
        return result

    @uncompiled
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, in place, for example to clip them.

        Args:
            optimizer: The optimizer, whose next `step` takes the gradients as they are.

        Raises:
            RuntimeError: If they are unscaled already.
            AssertionError: If nothing was scaled.
            GradientsError: If a gradient is float16.
            TypeError: If it is not an optimizer, or a LossScaleOptimizer.
        """
        if not self._enabled:
            return
        _check_steppable(optimizer)
        super().unscale_(optimizer)
        entry = self._per_optimizer_states[id(optimizer)]
        if entry.get("is_empty"):
            # Those of a later backward pass still have to be unscaled.
            entry["stage"] = OptState.READY

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        info, device = self._record_of(optimizer).info, found_inf.device
        entry = self._per_optimizer_states.get(id(optimizer), {})
        # An optimizer that skips by itself is given no second look, for which the host would wait.
        recheck = not _skips_by_itself(optimizer) and self._may_overflow()
        if info.has_half and not allow_fp16:
            gradients.check_can_be_divided(info, optimizer)
        by_device = gradients.unscale(
            info, inv_scale.to, recheck=recheck, into=found_inf, float16=allow_fp16, sums=False
        )
        here = bool(by_device)
        overflow = gradients.any_overflow(by_device.values(), device).to(device)
        if info.groups:
            overflow, _ = ranks.agreed(overflow, here, True, info.groups)
            here = here or overflow.item() >= 0
        # A step in which no process has a gradient does not count.
        entry["is_empty"] = not here
        return {device: overflow if here else torch.zeros_like(overflow)}

    @uncompiled
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients if `unscale_` did not, and applies them if all are finite.

        A step without any gradient is applied, and the scale stays. Several optimizers may share
        the scaler. Those that are unscaled by `unscale_` before the first of them steps are all
        applied or all skipped: their gradients may have been clipped together. An optimizer that
        skips its own step, such as `torch.optim.AdamW(parameters, fused=True)`, is called on a
        skipped step, too, so that the host does not wait.

        Args:
            optimizer: The optimizer.
            *args: Passed to `optimizer.step`.
            **kwargs: Passed to `optimizer.step`; a closure is an error.

        Returns:
            The result of `optimizer.step`, or None if the step was skipped (`last_step_skipped`).

        Raises:
            RuntimeError: If it is called twice without `update`, or with a closure.
            AssertionError: If nothing was scaled.
            GradientsError: If a gradient is float16.
            TypeError: If it is not an optimizer, or a LossScaleOptimizer.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        _check_steppable(optimizer)
        check_can_step(optimizer)
        if any(map(callable, args)) or "closure" in kwargs:
            raise CallOrderError(
                "step() of a GradScaler takes no closure: the optimizer would see scaled losses. "
                "Call step(closure) of a lossscale.torch.LossScaleOptimizer."
            )
        # An entry is made for what is asked for by index.
        if self._per_optimizer_states.get(id(optimizer), {}).get("stage") is OptState.UNSCALED:
            self._share_overflows()
        record = self._record_of(optimizer)
        # Hooks of the step may clear them.
        is_gone = not record.info.groups and record.info.first_gradient() is None
        alone = _skips_by_itself(optimizer) and not fused.takes_a_scaler(optimizer.step)
        step = self._step_that_skips_by_itself if alone else super().step
        result: float | None = step(optimizer, *args, **kwargs)
        entry = self._per_optimizer_states[id(optimizer)]
        if "skipped" not in entry:
            found: Flag = next(iter(entry["found_inf_per_device"].values()), False)
            self._count(optimizer, entry, found)
        # After the step, whose hooks may write what observers save.
        self._notify(entry["skipped"], optimizer)
        is_empty = entry.get("is_empty", False) or (is_gone and not bool(entry["skipped"]))
        record.first_steps.made(optimizer, is_empty, self._scaled_since_update)
        return result

    def _step_that_skips_by_itself(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """A step of an optimizer that reads `grad_scale` and `found_inf`, as PyTorch makes it."""
        self._check_scale_growth_tracker("step")
        entry = self._per_optimizer_states[id(optimizer)]
        if entry["stage"] is OptState.STEPPED:
            raise CallOrderError("step() was called twice without update(). Call it once.")
        is_scaled = entry["stage"] is OptState.READY
        if is_scaled:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        assert scale is not None
        divisor = scale if is_scaled else None
        # The kernel skips if it is exactly 1, and a subclass may have added some up.
        overflow = gradients.any_overflow(entry["found_inf_per_device"].values())
        overflow = overflow.to(scale.device).clamp(max=1)
        is_first = fused.makes_state(parts_of(optimizer))
        is_read = overflow.device.type == "cpu" or is_first or self._observers.read_skips
        is_skipped = is_read and self._is_skipped(optimizer, entry, divisor)
        result = None
        # In a skipped first step a kernel of SGD would keep uninitialized memory as the momentum.
        if not (is_skipped and is_first):
            with fused.attributes([optimizer], divisor, overflow):
                result = optimizer.step(*args, **kwargs)
        entry["stage"] = OptState.STEPPED
        return result

    def _share_overflows(self) -> None:
        """The optimizers that were unscaled, and maybe clipped, together see the overflows of all.

        Those that have stepped before are not among them.
        """
        states = self._per_optimizer_states.items()
        unscaled = {key: entry for key, entry in states if entry["stage"] is OptState.UNSCALED}
        some = {key: entry for key, entry in unscaled.items() if "is_shared" not in entry}
        overflows = [t for entry in some.values() for t in entry["found_inf_per_device"].values()]
        if len(overflows) < 2:
            return
        assert self._scale is not None
        device = self._scale.device
        shared = gradients.any_overflow(overflows, device).to(device)
        groups = [self._records[key].info.groups for key in some if key in self._records]
        union = tuple(dict.fromkeys(itertools.chain(*groups)))
        if any(len(own) < len(union) for own in groups):
            # One optimizer may be sharded over more processes than another.
            shared, _ = ranks.agreed(shared, True, True, union)
        for entry in some.values():
            entry.update(found_inf_per_device={device: shared}, is_shared=True)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # PyTorch's method would wait once more.
        is_skipped = self._is_skipped(optimizer, optimizer_state)
        return None if is_skipped else optimizer.step(*args, **kwargs)

    def _is_skipped(
        self, optimizer: Optimizer, entry: dict[str, Any], divisor: Tensor | None = None
    ) -> bool:
        """Waits for the decision on a step, counts it, and shows it to monitors."""
        overflow = gradients.any_overflow(entry["found_inf_per_device"].values())
        assert self._scale is not None
        if self._observers.have_monitor:
            together = torch.stack((overflow, self._scale.to(overflow)))
            number, scale = read_all(together).tolist()
            decided = Decided(optimizer.param_groups, scale, not number, divisor)
            self._observers.decided(decided)
        else:
            number = read(overflow)
        self._count(optimizer, entry, bool(number))
        return bool(number)

    def _count(self, optimizer: Optimizer, entry: dict[str, Any], flag: Flag) -> None:
        entry["skipped"] = self._last_skipped = flag
        self._record_of(optimizer).count.add(flag)

    def _notify(self, flag: Flag, optimizer: Optimizer | None = None) -> None:
        scale = None if optimizer is None else self._scale
        self._observers.stepped(Stepped(self, flag, scale, optimizer, len(self._records) > 1))

    @uncompiled
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale, once after the steps of all optimizers: down if any overflowed.

        Args:
            new_scale: The scale to set instead, a number or a tensor with one element.

        Raises:
            AssertionError: If neither `step` nor `unscale_` was called since the last one.
            ScalerArgumentError: If `new_scale` cannot be used.
        """
        if not self._enabled:
            return
        number = None if new_scale is None else _new_scale_of(new_scale, self._rule)
        left_out, skipped = self._left_out(), self._skipped_since_update()
        if number is None:
            self._move()
        else:
            if self._scale is not None:
                self._check_scale_growth_tracker("update")
            self._set_scale(number)
        self._skips.add(skipped)
        if left_out is not False:
            self._notify(left_out)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._scaled_since_update = False

    def _skipped_since_update(self) -> Flag:
        """Whether a step was skipped since the last call of `update`."""
        entries = self._per_optimizer_states.values()
        flags: list[Flag] = [entry["skipped"] for entry in entries if "skipped" in entry]
        tensors = [flag for flag in flags if isinstance(flag, Tensor)]
        return any(flag is True for flag in flags) or (
            gradients.any_overflow(tensors) if tensors else False
        )

    def _left_out(self) -> Flag:
        """Whether gradients have overflowed, and the program has called no `step`."""
        entries = self._per_optimizer_states.values()
        if any(entry["stage"] is OptState.STEPPED for entry in entries):
            return False
        by_tensor = _results_in(entries)
        return bool(by_tensor) and gradients.any_overflow(by_tensor.values())

    def _move(self) -> None:
        """Moves the scale by PyTorch's operator, which knows no limits, and keeps it in these."""
        states, rule = self._per_optimizer_states, self._rule
        entries = [entry for entry in states.values() if not entry.get("is_empty")]
        by_tensor = _results_in(entries)
        if by_tensor:
            # One tensor: PyTorch adds up the others in the first one, which is read later.
            overflow = gradients.any_overflow(by_tensor.values())
            self._per_optimizer_states = {0: {"found_inf_per_device": {overflow.device: overflow}}}
        elif states:
            self._check_scale_growth_tracker("update")
            return
        # Where it would pass the highest, it stays, as the rule says.
        is_free = rule.max_scale is None and rule.powers_of_two
        before = None if is_free or self._scale is None else self._scale.clone()
        # Without results it says what is missing.
        super().update()
        scale = self._scale
        assert scale is not None
        if not all(entry.get("skipped") is False for entry in entries):
            self._least *= rule.backoff_factor
            # Other code may have written it, and each step overflows.
            scale.nan_to_num_(nan=rule.min_scale)
        if before is not None:
            scale.copy_(torch.where(scale > rule.ceiling, before, scale))
        scale.clamp_(rule.min_scale, rule.ceiling)

    def _may_overflow(self) -> bool:
        """Whether the scale is below 1; waits only if it may have come down so far."""
        scale = self._scale
        # Other code may unscale by a number of its own, before there is a scale.
        if scale is not None and (self._least < 1.0 or scale.device.type == "cpu"):
            self._least = float(scale)
        return self._least < 1.0

    # --- Skips --------------------------------------------------------------------------------

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last call of `step` did not apply its optimizer; waits for the device."""
        # A replayed CUDA graph writes into the tensor.
        return bool(self._last_skipped)

    @property
    def steps_skipped(self) -> int:
        """The number of skipped steps; several before one `update` count as one."""
        return self._skips.read()[1] + bool(self._skipped_since_update())

    def register_step_skipped_hook(self, hook: Callable[[Optimizer], object]) -> RemovableHandle:
        """Registers a function that is called with each optimizer whose step is skipped.

        Each step then waits for the device.

        Returns:
            A handle with a method `remove`.
        """
        return self._observers.add(SkippedStepHook(hook))

    # --- The scale ----------------------------------------------------------------------------

    @property
    def rule(self) -> DynamicScale:
        """The rule that moves the loss scale."""
        return self._rule

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Accelerate calls it after it loads a state, whether or not there are tensors.
        if self._scale is None or self._growth_tracker is None:
            self._scale = scalar(self._init_scale, dev)
            self._growth_tracker = scalar(self._init_growth_tracker, dev, torch.int32)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None and self._process_group is not None:
            # Another process may have scaled a loss.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _limit_growth_tracker(self) -> None:
        # PyTorch tests equality, so a count beyond the interval would never reach it.
        most = self._rule.growth_interval - 1
        self._init_growth_tracker = min(self._init_growth_tracker, most)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=most)

    def _set_scale(self, number: float) -> None:
        self._init_scale = self._least = number
        if self._scale is not None:
            self._scale.fill_(number)

    def state_dict(self) -> dict[str, Any]:
        """The state as Python numbers, which PyTorch's own scaler loads too; empty if disabled."""
        if not self._enabled:
            return {}
        return {**super().state_dict(), "steps_skipped": self.steps_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of PyTorch's; does nothing if disabled.

        Args:
            state_dict: What `state_dict()` returned; values that it does not have stay. A scale
                outside the range of the rule is moved into it, with a warning.

        Raises:
            StateDictError: If it is empty or of another kind; nothing changes then.
            ScalerArgumentError: If a number in it cannot be used; nothing changes then.
        """
        if not self._enabled:
            return
        # Not by `get_scale`, which PyTorch's method does not call here.
        number = self._init_scale if self._scale is None else float(self._scale)
        now = ScaleState(number, self._get_growth_tracker())
        with _as_of_a_scaler():
            self._rule, state, skipped = state_dicts.read_scaler_state(state_dict, self._rule, now)
        self._set_scale(state.scale)
        self._init_growth_tracker = state.good_steps
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(state.good_steps)
        self._limit_growth_tracker()
        if skipped is not None:
            self._skips = _SkipCount(skipped)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_skips": _SkipCount(self._skips.read()[1])}
        return {name: value for name, value in state.items() if name not in _OF_ONE_SCALER}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        made = type(self).__new__(type(self))
        # Process groups cannot be copied.
        memo[id(self._process_group)] = self._process_group
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


def _results_in(entries: Iterable[dict[str, Any]]) -> dict[int, Tensor]:
    """What optimizers have found, by the ids of the tensors: several may have one together."""
    return {id(t): t for entry in entries for t in entry["found_inf_per_device"].values()}


def _skips_by_itself(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# --- Arguments ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_of_a_scaler() -> Iterator[None]:
    """Raises an `ArgumentError` as one that is also an `AssertionError`, as PyTorch's are."""
    try:
        yield
    except ArgumentError as error:
        raise ScalerArgumentError(str(error)) from None


def _new_scale_of(new_scale: object, rule: DynamicScale) -> float:
    """Returns the number that `update(new_scale)` sets.

    Args:
        new_scale: A number, or a tensor with one element that needs no gradient.
        rule: The rule, whose range it must lie in.

    Raises:
        ScalerArgumentError: If it is none of these.
    """
    if isinstance(new_scale, Tensor) and new_scale.requires_grad:
        raise ScalerArgumentError(f"`new_scale` requires a gradient. Received: {new_scale!r}.")
    with _as_of_a_scaler():
        number = checked_number("new_scale", new_scale)
    if float(rule.restored(rule.init()._replace(scale=number)).scale) != number:
        raise ScalerArgumentError(
            f"`new_scale` must be a scale of the scaler's rule, {rule!r}. Received: new_scale="
            f"{new_scale!r}. Make the scaler with another `min_scale` or `max_scale`."
        )
    return number


def _check_steppable(optimizer: Any) -> None:
    """Refuses optimizers that a scaler cannot step.

    Raises:
        ArgumentTypeError: If it is not an optimizer.
        AlreadyWrappedError: If it is a LossScaleOptimizer.
    """
    if isinstance(optimizer, FrontDoor):
        raise AlreadyWrappedError(
            "This optimizer is a LossScaleOptimizer, which scales by itself. Use it without a "
            f"GradScaler, or pass its inner optimizer. Received: {optimizer!r}."
        )
    if isinstance(optimizer, (list, tuple)):
        raise ArgumentTypeError(
            "A GradScaler steps one optimizer at a time. Write scaler.step(first) and "
            "scaler.step(second); after scaler.unscale_(first) and scaler.unscale_(second), both "
            f"step or none. Received: a {type(optimizer).__name__}."
        )
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentTypeError(
            "A GradScaler unscales and steps an optimizer, such as "
            f"torch.optim.AdamW(model.parameters()). Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}."
        )

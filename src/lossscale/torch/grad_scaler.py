"""`GradScaler`: a drop-in for PyTorch's, without its defects.

The scale is a Python number, and two tensors on a device have the same value. Compiled code, CUDA
graphs and other libraries keep references to the tensors, so they are changed in place and never
replaced. Other code may write to them. PyTorch counts writes to a tensor, so the host reads it back
only after such a write.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.utils.hooks import RemovableHandle

from lossscale.checks import checked_truth, checks_keywords
from lossscale.common.checks import warned_at_floor
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentTypeError,
    CallOrderError,
    ScalerArgumentError,
    UnsupportedError,
)
from lossscale.optimizer import LossScaleOptimizer
from lossscale.packages import warn
from lossscale.rules import ScaleRule, ScaleState, StatsRequest
from lossscale.torch import buffers, fused, gradient_stats, gradients, overflow_check, ranks
from lossscale.torch import state_dict as state_dicts
from lossscale.torch.backward import divide, is_seen, multiply, watch
from lossscale.torch.engine import Engine, StepDecision
from lossscale.torch.ranks import ParameterInfo, groups_of, parameters_of
from lossscale.torch.scale import Counts, Multiplier, update_on_host
from lossscale.torch.scaler_arguments import (
    DEFAULTS,
    as_of_a_scaler,
    new_scale_of,
    rule_of_a_scaler,
)
from lossscale.torch.scaling import CPU, read, scalar, scaled, uncompiled

_CLIPPED = "torch.nn.utils.clip_grad_norm_(parameters, {value!r}) after scaler.unscale_(optimizer)"
_INSTEAD = {
    "clip_norm": _CLIPPED,
    "dynamic": "rule=lossscale.FixedScale(scale) for a scale that stays",
}

_OF_ONE_SCALER = frozenset(
    {"_engines", "_skipped_hooks", "_multiplier", "_start", "_unowned", "_unowned_by", "_watcher"}
)
"""Attributes that a copy does not share."""

_READY, _UNSCALED, _STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` without its defects: the same calls, numbers and files.

    ```
    scaler.scale(loss).backward()
    scaler.step(optimizer)      # unscales, checks, applies or skips
    scaler.update()             # moves the scale
    ```

    The scale and its reciprocal are always normal float32 numbers, so no sequence of overflows
    destroys the parameters. A skipped step does not call the optimizer, not even a fused one.

    Args:
        device: The type of device, such as "cuda" or "cpu".
        init_scale: The first loss scale.
        growth_factor: Factor of the scale after `growth_interval` finite steps in a row, above 1.
        backoff_factor: Factor of the scale after a step with a gradient that is not finite, between
            0 and 1.
        growth_interval: Number of finite steps in a row that raise the scale, at least 1.
        enabled: If False, `scale` and `step` pass through, and the other methods do nothing. With
            "cuda" on a machine without CUDA it becomes False, with a warning.
        rule: A rule of this library instead of these numbers, such as `FixedScale(128)`.
        min_scale: The lowest loss scale; None stands for 2**-126.
        max_scale: The highest; None stands for 2**126.
        process_group: A `torch.distributed.ProcessGroup`, or a list of them, whose processes skip
            a step together, besides the groups of parameters that are DTensors. `[]` turns off
            the groups of DTensors too.

    Raises:
        ScalerArgumentError: If a value cannot be used.
        ArgumentTypeError: If `rule` or `process_group` is something else.

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
    _scale: Any
    _growth_tracker: Any
    _init_scale: float
    _init_growth_tracker: int

    _watcher: Any = None
    """The monitor that is notified of each decision."""

    _warned_at_floor = False

    on_device = False
    """False: a `GradScaler` decides on the host whether a step is skipped."""
    is_unseen = False
    """Whether a loss was scaled since `update` whose backward pass cannot be observed."""
    _multiplier: Multiplier | None = None

    @checks_keywords("GradScaler", _INSTEAD)
    def __init__(
        self,
        device: Any = "cuda",
        init_scale: float = DEFAULTS.initial_scale,
        growth_factor: float = DEFAULTS.growth_factor,
        backoff_factor: float = DEFAULTS.backoff_factor,
        growth_interval: int = DEFAULTS.growth_interval,
        enabled: bool = True,
        *,
        rule: ScaleRule | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        process_group: Any = None,
    ) -> None:
        if isinstance(device, (int, float)):
            raise ScalerArgumentError(
                '`device` must be the name of a type of device, such as "cuda" or "cpu". The first '
                "argument of torch.cuda.amp.GradScaler is `init_scale`; here that is the second. "
                f"Received: device={device!r}."
            )
        made = rule_of_a_scaler(
            rule,
            initial_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        enabled = checked_truth("enabled", enabled, ScalerArgumentError)
        groups_of((), process_group)
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warn(
                "GradScaler is enabled for CUDA, but CUDA is not available. Disabling. To scale on "
                'the processor pass device="cpu".'
            )
            enabled = False
        # If enabled, PyTorch's constructor would check the numbers by its own rules.
        super().__init__(device, enabled=False)
        self._enabled = enabled
        self._process_group = process_group
        self._rule = made
        self._state: ScaleState = made.init()
        self._init_scale = self._number = float(made.loss_scale(self._state))
        self._init_growth_tracker = 0
        self._scale = self._growth_tracker = None
        self._written: tuple[Any, ...] | None = None
        self._per_optimizer_states: Any = defaultdict(_refresh_per_optimizer_state)
        self._scaled_since_update = False
        self._steps_skipped, self._last_step_skipped = 0, False
        self._forget()

    def __repr__(self) -> str:
        if not self.is_enabled():
            return "<GradScaler, not enabled>"
        return f"<GradScaler: loss scale {self.get_scale():g}, {self.steps_skipped} steps skipped>"

    def _forget(self) -> None:
        """Forgets optimizers, parameters and hooks, which a copy does not share."""
        self._multiplier, self._start = None, Counts(0, 0, False)
        # Tensors with gradients that belong to no optimizer that was used here yet; their scale.
        self._unowned: dict[int, Any] = {}
        self._unowned_by: Multiplier | None = None
        self._is_graph = False
        self._engines: dict[int, Engine] = {}
        self._skipped_hooks: dict[int, Any] = OrderedDict()

    def _engine_of(self, optimizer: Any) -> Engine:
        """The engine of an optimizer."""
        key, engine = id(optimizer), self._engines.get(id(optimizer))
        if engine is None:
            engines, reference = self._engines, lambda: optimizer
            # With `__slots__` it cannot be referred to weakly.
            with contextlib.suppress(TypeError):
                # Called when the optimizer is gone.
                reference = weakref.ref(optimizer, lambda _: engines.pop(key, None))
            engine = engines[key] = Engine(reference, self, process_group=self._process_group)
            engine.shares_overflows = False
            engine.watch_steps(_warn_of_scaled_gradients)
            info = engine.info()
            if engine.end_others(info):
                engine.record.remember(info)
            known = self._unowned.keys() & info.ids
            if known:
                if any(p.grad is not None and id(p) not in known for p in info.parameters):
                    part = [p for p in info.parameters if id(p) in known]
                    engine.record.part = ParameterInfo(part, [])
                self._unowned = {k: ref for k, ref in self._unowned.items() if k not in known}
                engine.record.scaled_by, engine.record.is_graph = self._unowned_by, self._is_graph
        return engine

    def track_unowned(self, rest: Sequence[Any], by: Multiplier) -> None:
        """Called before gradients are added to tensors of no optimizer that was used here yet."""
        known = {key: t for key, ref in self._unowned.items() if (t := ref()) is not None}
        new = [t for t in rest if id(t) not in known]
        if self._unowned_by is not by:
            multiply(ParameterInfo(list(known.values()), []), by, self._unowned_by)
        multiply(ParameterInfo(new, []), by)
        self._unowned = {id(t): weakref.ref(t) for t in (*known.values(), *new)}
        self._unowned_by, self._is_graph = by, self._is_graph or torch.is_grad_enabled()

    @property
    def multiplier(self) -> Multiplier:
        """The current loss scale; the same object until it changes."""
        number = self.get_scale()
        if self._multiplier is None or self._multiplier.number != number:
            scale = scalar(number, self._scale.device)
            self._multiplier = Multiplier(scale, self._rule, number)
        return self._multiplier

    # --- The calls of a training loop ---------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
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

        def scaled_one(loss: Any) -> Any:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(loss.device)
            # Compiled code and CUDA graphs read the tensor that is changed in place.
            if torch.compiler.is_compiling() or not is_seen(loss):
                self.is_unseen = True
                return scaled(loss, self._scale)
            by = self.multiplier
            multiplied = scaled(loss, by.on(loss.device).scale)
            watch(multiplied, loss, by, None, self)
            return multiplied

        result = _mapped(scaled_one, outputs)
        self._scaled_since_update = True
        return result

    @uncompiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, in place, for example to clip them.

        They are divided by the scale that multiplied the loss, even if it has changed since.

        Args:
            optimizer: The optimizer, whose next `step` takes the gradients as they are.

        Raises:
            CallOrderError: If they are unscaled already, or nothing was scaled.
            GradientsError: If a gradient is float16.
            TypeError: If it is not an optimizer, or a LossScaleOptimizer.
        """
        if not self._enabled:
            return
        _check_optimizer(optimizer)
        self._check_something_scaled("unscale_()", optimizer)
        entry = self._per_optimizer_states[id(optimizer)]
        if entry["stage"] is _UNSCALED:
            raise CallOrderError(
                "unscale_() was called twice on this optimizer since the last update(). Call it "
                "once for each step, after the last backward(). If a step is left out, call "
                "update() in its place."
            )
        if entry["stage"] is _STEPPED:
            raise CallOrderError(
                "unscale_() was called after step(). Call it before, or update() in between."
            )
        self._unscale(optimizer, entry)

    def _unscale(self, optimizer: Any, entry: dict[str, Any], leaves_half: bool = False) -> None:
        """Divides gradients by the scale that multiplied them, and stores whether they overflowed.

        Args:
            optimizer: The optimizer.
            entry: Its entry in `_per_optimizer_states`.
            leaves_half: Whether float16 gradients may be left to the kernel of the optimizer,
                which divides them in float32.
        """
        engine, device = self._engine_of(optimizer), self._scale.device
        record, info = engine.record, engine.info()
        engine.end_others(info)
        if record.part is not None:
            # A wrapper's loss has reached some of the parameters.
            engine.end(record.part)
        by: Any = record.scaled_by or self.multiplier
        # Gradients that stay after a step are unscaled, as long as nothing was added to them.
        are_unscaled = (
            self._scaled_since_update and not self.is_unseen and record.is_as_it_was(info)
        )
        number = 1.0 if are_unscaled and record.scaled_by is None else by.number
        if entry["stage"] is _READY:
            self._measure(engine, entry)
        if leaves_half and info.has_half and fused.can_skip(optimizer):
            unscaled = self._check_inf_per_device(optimizer)
            entry["divisor"] = scalar(number, device)
            if number < 1 and unscaled:
                given = gradients.collect(info, allow_float16=True)
                quotients = overflow_check.check_quotients(given, entry["divisor"].to)
                if any(map(read, quotients.values())):
                    next(iter(unscaled.values())).fill_(1)
        else:
            inverse, found = scalar(1.0 / number, device), scalar(0.0, device)
            unscaled = self._unscale_grads_(optimizer, inverse, found, False)
        for overflow in unscaled.values() if record.found is not None else ():
            torch.maximum(overflow, record.found.to(overflow.device), out=overflow)
        # Also without a gradient on this process: others may have some.
        entry["groups"], entry["found_inf_per_device"] = info.groups, unscaled
        record.scaled_by, record.is_graph = None, False
        record.found = overflow_check.any_overflow(dict(unscaled), device)
        record.remember(info)
        # Without gradients, those of a later backward pass still have to be unscaled.
        if unscaled or info.first_gradient() is not None:
            entry["stage"] = _UNSCALED

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _measure(self, engine: Engine, entry: dict[str, Any]) -> None:
        """Stores the statistics that the rule needs besides overflow, of scaled gradients."""
        if self._rule.needs != StatsRequest():
            info, by = engine.info(), engine.record.scaled_by or self.multiplier
            given = gradients.collect(info, allow_float16=True)
            entry["measured"] = engine.measured(given, info, by, are_scaled=True)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> dict[Any, Any]:
        engine, checks = self._engine_of(optimizer), self._rule.checks_gradients
        info, on_host = engine.info(), inv_scale.device.type == "cpu"
        number = 1.0 / inv_scale.item() if on_host else self.get_scale()
        by_device: dict[Any, Any] = divide(
            info,
            Multiplier(inv_scale.reciprocal(), DEFAULTS, number, inv_scale),
            graph=engine.record.is_graph,
            checks=checks,
            allow_float16=allow_fp16,
            found=found_inf,
        )
        if not info.groups or not checks:
            return by_device
        overflow = overflow_check.any_overflow(by_device, found_inf.device)
        overflow, _ = ranks.agreed(overflow, bool(by_device), True, info.groups)
        # A step in which no process has a gradient does not count.
        return {overflow.device: overflow} if by_device or overflow.item() >= 0 else {}

    @uncompiled
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscales the gradients if `unscale_` did not, and applies them if all are finite.

        A step without any gradient is applied, and the scale stays. Several optimizers may share
        the scaler. Those that are unscaled by `unscale_` before the first of them steps are all
        applied or all skipped: their gradients may have been clipped together.

        Args:
            optimizer: An optimizer, or a list of them, which are all applied or all skipped.
            *args: Passed to `optimizer.step`.
            **kwargs: Passed to `optimizer.step`; a closure is an error.

        Returns:
            What `optimizer.step` returns, or None if the step was skipped (`last_step_skipped`).

        Raises:
            CallOrderError: If it is called twice without `update`, if nothing was scaled, or with
                a closure.
            GradientsError: If a gradient is float16.
            TypeError: If it is not an optimizer, or a LossScaleOptimizer.
        """
        if isinstance(optimizer, (list, tuple)):
            if self._enabled:
                self._unscale_several(optimizer)
            return [self.step(each, *args, **kwargs) for each in optimizer]
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        _check_optimizer(optimizer)
        _refuse_closure(args, kwargs)
        if (
            not self._scaled_since_update
            and fused.is_dummy_step(optimizer)
            and (self._process_group is None or _has_only_zeros(optimizer))
        ):
            # It only creates the optimizer's state, before a checkpoint is loaded into it.
            self._per_optimizer_states[id(optimizer)]["stage"] = _STEPPED
            return optimizer.step(*args, **kwargs)
        self._check_something_scaled("step()", optimizer)
        engine, entry = self._engine_of(optimizer), self._per_optimizer_states[id(optimizer)]
        if entry["stage"] is _STEPPED:
            raise CallOrderError(
                "step() was called twice on this optimizer since the last update(). Call update() "
                "once after the steps of all optimizers."
            )
        is_its_own = fused.can_skip(optimizer) and not fused.steps_as_torch(optimizer)
        if is_its_own and fused.takes_a_scaler(optimizer.step):
            result = self._step_of_its_own(optimizer, engine, entry, args, kwargs)
        else:
            if entry["stage"] is _READY or engine.record.scaled_by is not None:
                # Also if a backward() came after unscale_().
                self._unscale(optimizer, entry, leaves_half=True)
                self._decide([entry])
            result = self._maybe_opt_step(optimizer, entry, *args, **kwargs)
        entry["stage"] = _STEPPED
        engine.record.reset()
        engine.record.remember(engine.info())
        return result

    def _unscale_several(self, optimizers: Sequence[Any]) -> None:
        """Unscales the gradients of optimizers that are all applied or all skipped."""
        for each in optimizers:
            _check_optimizer(each, is_one_of_several=True)
            self._check_something_scaled("step()", each)
        for each in optimizers:
            entry = self._per_optimizer_states[id(each)]
            if entry["stage"] is _READY:
                self._unscale(each, entry, leaves_half=True)

    def _check_something_scaled(self, call: str, optimizer: Any) -> None:
        """Checks that a loss was scaled; with a process group, maybe on another process."""
        if self._scale is None and self._process_group is not None:
            for parameter in parameters_of(optimizer)[:1]:
                self._lazy_init_scale_growth_tracker(parameter.device)
        self._check_scale_growth_tracker(call)

    def _step_of_its_own(
        self, optimizer: Any, engine: Engine, entry: dict[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """A step of an optimizer that takes the scaler, as PyTorch's did before 2.0."""
        warn(
            "The step of this optimizer has an argument `grad_scaler`, which is deprecated: it "
            "can read the attributes `grad_scale` and `found_inf` instead.",
            FutureWarning,
        )
        if entry["stage"] is _READY:
            self._measure(engine, entry)
        result = optimizer.step(*args, **kwargs, grad_scaler=self)
        self._decide([entry])
        self._note(optimizer, engine, entry)
        return result

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        engine, entries = self._engine_of(optimizer), self._per_optimizer_states.values()
        if "skipped" not in optimizer_state:
            # The gradients of all that are unscaled by now may have been clipped together.
            unscaled = [e for e in entries if "groups" in e and e["stage"] is not _STEPPED]
            self._decide(unscaled or [optimizer_state])
        self._note(optimizer, engine, optimizer_state)
        decision = StepDecision(
            not optimizer_state["skipped"],
            divisor=optimizer_state.get("divisor"),
            empty=engine.info().first_gradient() is None,
        )
        return engine.apply(decision, *args, **kwargs)

    def _decide(self, entries: Sequence[dict[str, Any]]) -> None:
        """Decides whether some optimizers are all applied or all skipped."""
        found = [number for entry in entries for number in entry["found_inf_per_device"].values()]
        skipped = any(map(read, found))
        groups = [entry["groups"] for entry in entries if "groups" in entry]
        union = tuple(dict.fromkeys(itertools.chain(*groups)))
        if any(len(own) < len(union) for own in groups):
            # One optimizer may be sharded over more processes than another.
            here = scalar(float(skipped), CPU)
            skipped = ranks.agreed(here, True, True, union)[0].item() > 0
        for entry in entries:
            # It may have been skipped with others before it had gradients.
            entry["skipped"] = skipped or entry.get("skipped", False)

    @uncompiled
    def update(self, new_scale: Any = None) -> None:
        """Updates the scale, once after the steps of all optimizers: down if any overflowed.

        Args:
            new_scale: The scale to set instead, a number or a tensor with one element.

        Raises:
            CallOrderError: If neither `step` nor `unscale_` was called since the last one.
            ScalerArgumentError: If `new_scale` cannot be used.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            number = new_scale_of(new_scale, self._rule)
            self._put(self._read()._replace(scale=number))
        elif not self._per_optimizer_states:
            raise CallOrderError(
                "update() was called without a step. Call scaler.step(optimizer) before it."
            )
        else:
            self._move_by(list(self._per_optimizer_states.values()))
        buffers.note_step(self, False)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._scaled_since_update = self.is_unseen = False
        for engine in self._engines.values():
            engine.record.found = None

    def _move_by(self, entries: Sequence[dict[str, Any]]) -> None:
        # A step without gradients does not count.
        if self._rule.checks_gradients and not any(e["found_inf_per_device"] for e in entries):
            return
        for entry in entries:
            # A decision that `step` has read is not waited for again.
            if "skipped" not in entry:
                self._decide([entry])
        skipped = any(entry["skipped"] for entry in entries)
        measured = [entry["measured"] for entry in entries if "measured" in entry]
        seen = gradient_stats.together(measured) if measured else None
        before = self._read()
        stats = gradient_stats.as_stats(self._rule.needs, seen, not skipped)
        self._put(update_on_host(self._rule, before, stats))
        if skipped and not self._warned_at_floor:
            write = "GradScaler(min_scale=2.0**-24)"
            self._warned_at_floor = warned_at_floor(self._rule, before.scale, write)

    # --- Skips --------------------------------------------------------------------------------

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last call of `step` did not apply its optimizer."""
        return self._last_step_skipped

    def last_step_skipped_of(self, optimizer: Any) -> bool:
        """Whether the last call of `step` with this optimizer did not apply it."""
        engine = self._engines.get(id(optimizer))
        return engine is not None and engine.counts.last_step_skipped

    @property
    def steps_skipped(self) -> int:
        """How many calls of `step` did not apply their optimizer, of all optimizers together."""
        return self._steps_skipped

    def register_step_skipped_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Registers a function that is called with each optimizer whose step is skipped.

        Returns:
            A handle with a method `remove`.
        """
        handle = RemovableHandle(self._skipped_hooks)
        self._skipped_hooks[handle.id] = hook
        return handle

    def _note(self, optimizer: Any, engine: Engine, entry: dict[str, Any]) -> None:
        """Counts a step, and notifies the monitor and the hooks."""
        skipped = self._last_step_skipped = entry["skipped"]
        if self._watcher is not None:
            self._watcher.decided(
                optimizer.param_groups,
                scale=self._number,
                applied=not skipped,
                divisor=entry.get("divisor"),
            )
        engine.counts = engine.counts.plus(skipped)
        # Others may have computed on the same forward passes, which `update` ends.
        buffers.note_step(self, skipped, is_end=False)
        if not skipped:
            return
        self._steps_skipped += 1
        for hook in list(self._skipped_hooks.values()):
            hook(optimizer)

    # --- The scale ----------------------------------------------------------------------------

    @property
    def rule(self) -> ScaleRule:
        """The rule that moves the loss scale."""
        return self._rule

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return float(state_dicts.setting(self._rule, "growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor, above 1."""
        self._set(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor by which the scale backs off after an overflow."""
        return float(state_dicts.setting(self._rule, "backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor, between 0 and 1."""
        self._set(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """The number of finite steps in a row that raise the scale."""
        return int(state_dicts.setting(self._rule, "growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval, in steps; a shorter one takes effect on the next step."""
        self._set(growth_interval=new_interval)

    def _set(self, **settings: Any) -> None:
        with as_of_a_scaler():
            self._rule = state_dicts.with_settings(self._rule, **settings)
        self._put(state_dicts.before_growth(self._rule, self._read()))

    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)

    def get_scale(self) -> float:
        """The loss scale; 1 if disabled. Waits for no device."""
        if not self._enabled:
            return 1.0
        self._read()
        return self._number

    def _get_growth_tracker(self) -> int:
        return getattr(self._read(), "good_steps", 0) if self._enabled else 0

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        # Accelerate calls it after it loads a state, whether or not there are tensors.
        if self._scale is None or self._growth_tracker is None:
            self._scale = scalar(self._init_scale, dev)
            self._growth_tracker = scalar(self._init_growth_tracker, dev, torch.int32)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Any, Any]:
        if self._scale is None or self._growth_tracker is None:
            raise CallOrderError(
                f"{funcname} was called before anything was scaled. Call "
                "scaler.scale(loss).backward() first."
            )
        return self._scale, self._growth_tracker

    def _read(self) -> ScaleState:
        """The state of the rule, as Python numbers."""
        scale, tracker, left = self._scale, self._growth_tracker, self._written
        if scale is None or tracker is None:
            self._take(self._init_scale, self._init_growth_tracker)
        elif scale.device.type == "cpu" or left != _version_of(scale) + _version_of(tracker):
            # Writes through `.data` or NumPy do not change the version; reading a CPU is cheap.
            self._take(scale.item(), tracker.item())
            self._remember_written()
        return self._state

    def _remember_written(self) -> None:
        self._written = _version_of(self._scale) + _version_of(self._growth_tracker)

    def _take(self, scale: float, good_steps: int) -> None:
        if scale != self._number:
            self._number, self._state = scale, self._state._replace(scale=scale)
        if good_steps != getattr(self._state, "good_steps", good_steps):
            self._state = self._state._replace(good_steps=good_steps)

    def _put(self, state: ScaleState) -> None:
        """Writes a state to the tensors where it differs from them."""
        before, number = self._read(), float(self._rule.loss_scale(state))
        good_steps = getattr(state, "good_steps", 0)
        if self._scale is not None:
            # A NaN differs from itself, and is written again.
            if number != self._number:
                self._scale.fill_(number)
            if good_steps != getattr(before, "good_steps", 0):
                self._growth_tracker.fill_(good_steps)
            self._remember_written()
        self._state, self._number = state, number
        self._init_scale, self._init_growth_tracker = number, good_steps

    def state_dict(self) -> dict[str, Any]:
        """The state as Python numbers, which PyTorch's own scaler loads too; empty if disabled."""
        if not self._enabled:
            return {}
        return state_dicts.scaler_state(self._rule, self._read(), self._number, self._steps_skipped)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state of this class, of PyTorch's or of Apex; does nothing if disabled.

        Args:
            state_dict: What `state_dict()` returned; values that it does not have stay. From Apex
                that of a loss scaler, or `amp.state_dict()`. A scale outside the range of the rule
                is moved into it, with a warning.

        Raises:
            StateDictError: If it is empty or not of these kinds; nothing changes then.
            ScalerArgumentError: If a factor in it cannot be used.
        """
        if not self._enabled:
            return
        with as_of_a_scaler():
            read = state_dicts.read_scaler_state(state_dict, self._rule, self._read())
        self._rule = read.rule
        self._put(read.state)
        if read.steps_skipped is not None:
            self._steps_skipped = read.steps_skipped

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise CallOrderError(
                "A GradScaler can be copied or pickled only between steps: before scale(), or "
                "after update()."
            )
        self._read()
        state = {name: v for name, v in vars(self).items() if name not in _OF_ONE_SCALER}
        number, good_steps = self._number, self._get_growth_tracker()
        state.update(_scale=None, _growth_tracker=None, _written=None)
        return {**state, "_init_scale": number, "_init_growth_tracker": good_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        made = type(self).__new__(type(self))
        # Process groups cannot be copied.
        memo[id(self._process_group)] = self._process_group
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


def _version_of(tensor: Any) -> tuple[int, int, int]:
    # Within `torch.func` a tensor has no address.
    place = 0 if tensor.device.type == "cpu" else tensor.data_ptr()
    return id(tensor), place, tensor._version


def _mapped(function: Callable[[Any], Any], outputs: Any) -> Any:
    """Applies a function to each tensor of a nest; an iterable is returned as an iterator."""
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        return {key: _mapped(function, value) for key, value in outputs.items()}
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
        nest = [_mapped(function, value) for value in outputs]
        if hasattr(outputs, "_fields"):
            return type(outputs)(*nest)
        return type(outputs)(nest) if isinstance(outputs, (list, tuple)) else iter(nest)
    raise ScalerArgumentError(
        "`outputs` must be a tensor, or a dictionary, sequence or other iterable of tensors: the "
        f"losses to scale. Received: {outputs!r} of type {type(outputs).__name__}."
    )


def _check_optimizer(optimizer: Any, is_one_of_several: bool = False) -> None:
    """Refuses optimizers that a scaler cannot step.

    Raises:
        ArgumentTypeError: If it is not an optimizer.
        AlreadyWrappedError: If it is a LossScaleOptimizer.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        raise AlreadyWrappedError(
            "This optimizer is a LossScaleOptimizer, which scales by itself. Use it without a "
            f"GradScaler, or pass its inner optimizer. Received: {optimizer!r}."
        )
    if is_one_of_several and fused.takes_a_scaler(optimizer.step):
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot skip together with other optimizers: its step "
            "takes a `grad_scaler` and decides by itself. Step it alone."
        )
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentTypeError(
            "A GradScaler unscales and steps an optimizer, such as "
            f"torch.optim.AdamW(model.parameters()). Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}."
        )


def _warn_of_scaled_gradients(engine: Engine, optimizer: Any) -> None:
    """Warns, once, of a direct step of an optimizer on scaled gradients."""
    # No error: PyTorch's scaler allows it, and a program may have divided them by hand.
    if not engine.record.warned:
        engine.record.warned = True
        warn(
            f"{type(optimizer).__name__}.step() was called on scaled gradients, unless you divided "
            "them by hand. Call scaler.step(optimizer) in its place, or "
            "scaler.unscale_(optimizer) before it."
        )


def _has_only_zeros(optimizer: Any) -> bool:
    return not any(p.grad is not None and p.grad.any() for p in parameters_of(optimizer))


def _refuse_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses a closure, by position or by keyword.

    Raises:
        CallOrderError: If there is one.
    """
    if any(map(callable, args)) or kwargs.get("closure") is not None:
        raise CallOrderError(
            "step() of a GradScaler takes no closure: the optimizer would see scaled losses. "
            "lossscale.torch.LossScaleOptimizer takes closures, also those of LBFGS."
        )

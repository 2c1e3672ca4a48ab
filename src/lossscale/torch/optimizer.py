"""The loss scale optimizer for PyTorch: `torch.optim.Optimizer` around another one."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lossscale.arguments import rule_from_arguments
from lossscale.errors import CallOrderError, UnsupportedError
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.packages import warn
from lossscale.rules import ScaleRule
from lossscale.torch import arguments, fused, gradients, ranks
from lossscale.torch import state_dict as state_dicts
from lossscale.torch.attributes import InnerAttributes
from lossscale.torch.backward import Inputs, is_seen, prepare_backward, remember_scaled, watch
from lossscale.torch.closures import step_with_closure
from lossscale.torch.engine import Engine, StepDecision
from lossscale.torch.gradient_record import BackwardPass
from lossscale.torch.observers import Decided, FloorWarning, Observers, SkippedStepHook, Stepped
from lossscale.torch.optimizer_list import (
    OptimizerList,
    check_can_step,
    parts_of,
    with_parts,
    zero_grad,
)
from lossscale.torch.scale import DeviceLossScale, LossScale, Multiplier
from lossscale.torch.scaling import CPU, WIDE, scalar, uncompiled, widened
from lossscale.wrapper import living_wrapper, remember_wrapper

_NOTHING_SCALED = (
    "The optimizer has scaled no loss since its last step, and takes the gradients as they are. "
    "That is correct for float32, unless a GradScaler or another LossScaleOptimizer scaled the "
    "loss; float16 gradients may have flushed to zero. Call optimizer.backward(loss) in place of "
    "loss.backward()."
)


Loss = TypeVar("Loss")
Number = TypeVar("Number")


@FrontDoor.register
class LossScaleOptimizer(InnerAttributes, Optimizer):
    """Wraps a PyTorch optimizer to train in float16 with a loss scale.

    The wrapper is a `torch.optim.Optimizer` with the parameter groups, the state and the hooks of
    the inner optimizer. `backward` scales the loss and unscales its gradients. `step` applies the
    gradients, or skips the step if one is not finite, and updates the loss scale.

    Args:
        inner_optimizer: The `torch.optim.Optimizer` to wrap, an instance; or a list of them, which
            share one scale and skip a step together.
        dynamic: Whether the scale changes during training. If False, `initial_scale` is the fixed
            scale, and gradients are not checked.
        initial_scale: The first, or the fixed, loss scale: a number from 2**-126 to 2**126. None
            stands for 2**15.
        dynamic_growth_steps: Number of finite steps in a row that double the scale. None stands
            for 2000.
        rule: A `DynamicScale`, a `FixedScale` or a `ScaleRule` of your own, instead of the three
            arguments above.
        clip_norm: The largest 2-norm of all unscaled gradients together; larger ones are scaled
            down to it, as by `torch.nn.utils.clip_grad_norm_`. None for no clipping.
        process_group: A `torch.distributed.ProcessGroup`, or a list of them, whose processes skip
            a step together, besides the groups of parameters that are DTensors. None suffices with
            `DistributedDataParallel`; `[]` turns off the groups of DTensors too.
        decide: "host" waits in `step` until it is known whether all gradients are finite.
            "device" never waits: a fused optimizer reads the decision on the device and skips its
            own step.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer or already has loss scaling, `dynamic`
            is not a bool, or `rule` is not a `ScaleRule`.
        ValueError: If a value cannot be used.
        UnsupportedError: If the optimizer needs a closure within its step, as LBFGS does.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> inner = torch.optim.AdamW(model.parameters(), fused=True)
        >>> optimizer = lossscale.torch.LossScaleOptimizer(inner)
        >>> with torch.autocast("cpu", torch.float16):
        ...     loss = model(torch.ones(2, 3)).float().mean()
        >>> optimizer.scale_loss(loss).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.loss_scale, optimizer.steps_skipped
        (tensor(32768.), 0)

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, TensorFlow 2.4 to 2.15, and
    `torch.amp.GradScaler`.
    """

    # Where users find it, and so what pickles name.
    __module__ = "lossscale.torch"
    _framework: ClassVar[str] = "torch"

    def __init__(
        self,
        inner_optimizer: Optimizer | Sequence[Optimizer],
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        rule: ScaleRule | None = None,
        clip_norm: float | None = None,
        process_group: ranks.Groups = None,
        decide: Literal["host", "device"] = "host",
        name: str | None = None,
    ) -> None:
        # `Optimizer.__init__` is not called: groups, state and hooks belong to the inner optimizer.
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        if isinstance(inner_optimizer, (list, tuple)):
            for each in inner_optimizer:
                arguments.check_inner(each)
            inner_optimizer = OptimizerList(list(inner_optimizer))
        inner = cast(Optimizer, inner_optimizer)
        arguments.check_inner(inner)
        arguments.check_processes(inner, process_group)
        clip_norm = arguments.checked_clip_norm(clip_norm)
        arguments.check_decide(decide, inner)
        scale = _new_scale(rule, inner, decide)
        state_dicts.restore(scale, state_dicts.take_numbers(scale, inner))
        self._start(Engine(inner, scale, clip_norm, process_group), name or "loss_scale_optimizer")

    def _start(self, engine: Engine, name: str) -> None:
        self.name, self._rule, self._inner, self._engine = name, engine.rule, engine.inner, engine
        self._record, self._observers = engine.record, Observers()
        self._observers.add(FloorWarning())
        # Weakly: nothing but the user holds the wrapper.
        engine.record.leave_out = weakref.WeakMethod(self._leave_out)
        for each in with_parts(engine.inner):
            # That of a part may be a `MasterWeights`.
            if living_wrapper(each) is None:
                remember_wrapper(each, self)
            state_dicts.watch_loads(each, self)
        engine.record.watch_steps()

    @property
    def inner_optimizer(self) -> Optimizer:
        """The inner optimizer, which cannot be replaced by another one."""
        return self._inner

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(cast(OptimizerList, self._inner))

    def __len__(self) -> int:
        # For a single optimizer, Python raises that it has no length.
        return len(cast(OptimizerList, self._inner))

    def __bool__(self) -> bool:
        # An optimizer is true, also one without a length.
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the inner optimizer.

        Args:
            param_group: A dictionary with `params`, and settings for them.
        """
        self.inner_optimizer.add_param_group(param_group)
        self._record.note_added_group()

    # --- Backward -----------------------------------------------------------------------------

    @uncompiled
    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Computes unscaled gradients of a loss; call it in place of `loss.backward()`.

        The loss is multiplied by the loss scale, and the gradients in `.grad` are divided by it,
        in float32 or wider. Gradients of several calls add up, also with those of
        `loss.backward()`. If one of the calls overflows, `step` skips, whatever is done to the
        gradients in between.

        After an exception in the backward pass, the gradients accumulated so far stay in `.grad`,
        unscaled. Hooks that run within the pass see gradients multiplied by the loss scale.

        Args:
            loss: The unscaled loss, a tensor.
            gradient, retain_graph, create_graph, inputs: As for `torch.Tensor.backward`.

        Returns:
            Whether all gradients of the optimizer on this process are finite, including those from
            earlier calls and those of other wrappers that the loss reached: a 0-d boolean tensor.
            True if no parameter was reached, as with `inputs` that are not parameters. Reading it
            (`if`) waits for the device. `unscale_()` returns the decision of all processes.

        Raises:
            GradientsError: If a parameter has the dtype float16 without `MasterWeights`, or the
                loss is already scaled.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.backward(weight.sum()), weight.grad
            (tensor(True), tensor([1., 1.]))
            >>> optimizer.step()
        """
        record = self._record
        record.see_parameters()
        arguments.check_backpropagated(loss, record.inner, record.info.has_half)
        multiplier = self._engine.scale.multiplier
        finish = prepare_backward(loss, multiplier, record, BackwardPass(-1), inputs)
        try:
            _backpropagate(loss, multiplier, gradient, retain_graph, create_graph, inputs)
        finally:
            finish()
        check = record.last_check
        return scalar(True, CPU, torch.bool) if check is None else check.overflow == 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiplies the loss by the loss scale, before `.backward()` of the result.

        `step` divides the gradients by it. `backward` does both, and is the usual way. Scale each
        loss of a step once.

        Args:
            loss: A tensor of any shape and dtype.

        Returns:
            The product, in float32 or wider.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> inner = torch.optim.SGD([weight], lr=0.5)
            >>> optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8)
            >>> optimizer.scale_loss(weight.sum())
            tensor(16., grad_fn=<MulBackward0>)
        """
        record, scale = self._record, self._engine.scale
        arguments.check_is_tensor(loss)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            arguments.check_not_scaled(loss)
        if not is_compiling and is_seen(loss):
            multiplier = scale.multiplier
            scaled = widened(loss) * multiplier.scale_on(loss.device)
            watch(scaled, loss, multiplier, record)
        else:
            # A tensor, so that no code is compiled for one number.
            scaled = widened(loss) * scale.scale_on(loss.device)
            if torch.is_grad_enabled():
                record.note_unseen_loss()
        if not is_compiling:
            remember_scaled(scaled)
        return scaled

    def _check_unscaled(self, name: str) -> None:
        """Checks that a method of the inner optimizer finds unscaled, finite gradients."""
        record = self._record
        record.check_unscaled(name, self.inner_optimizer)
        check = record.last_check
        if check is not None and not check.is_gone(record.info) and bool(check.overflow > 0):
            raise CallOrderError(
                f"{name}() of {type(self.inner_optimizer).__name__} would use gradients that "
                "overflowed. Call it only if optimizer.backward(loss) returned true. Otherwise "
                "call step(), which skips the step and lowers the scale."
            )

    # --- Step ---------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, **more: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], Loss], **more: Any) -> Loss: ...

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Applies the gradients, or skips the step if one is not finite; updates the loss scale.

        Gradients of `scale_loss(loss).backward()` are divided by the loss scale first. If no loss
        was scaled, the gradients are applied as they are, and the loss scale stays. Without any
        gradient, nothing happens and no step is counted.

        Args:
            closure: A callable that evaluates the model, calls `optimizer.backward(loss)` and
                returns the loss. It is evaluated once, before the step.

        Returns:
            The result of the inner optimizer's `step`, or that of the closure.

        Raises:
            GradientsError: If a parameter and its gradient have the dtype float16.
            UnsupportedError: With a closure for an optimizer such as SAM, which moves the weights
                before it evaluates the closure. Make its two calls, `first_step` and `second_step`.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.scale_loss(weight.sum()).backward()
            >>> optimizer.step()
            >>> weight.detach()
            tensor([0.5000, 0.5000])
        """
        check_can_step(self.inner_optimizer)
        if closure is None:
            return self._take_step(**more)
        take_step = functools.partial(self._take_step, **more)
        return step_with_closure(parts_of(self.inner_optimizer), closure, take_step)

    # PyTorch's wrapper around a `step` would call global hooks twice, for the inner optimizer and
    # for this one.
    step.hooked = True  # type: ignore[attr-defined]  # of a function

    def _take_step(self, **more: Any) -> Any:
        """Decides on the gradients as they are now, applies or skips them, moves the scale."""
        record, engine = self._record, self._engine
        self._take_loaded(self._inner, by_hook=False)
        record.see_parameters()
        record.account_for_unseen_backward()
        known = record.decision
        decision = engine.decide() if known is None else engine.clipped(known)
        if decision.nobody_scaled:
            self._check_scaled()
            if decision.apply is not False and fused.is_dummy_step(self.inner_optimizer):
                # Of a checkpoint that is about to be loaded, with gradients of 0: no step.
                record.reset()
                return engine.apply(decision, **more)
        # If the optimizer raises, they are unscaled, or the kernel has begun to.
        record.note_decision(decision)
        self._notify_decided(decision)
        returned = engine.apply(decision, **more)
        self._finish(decision)
        return returned

    def _finish(self, decision: StepDecision, *, keep: bool = False) -> None:
        """Moves the scale and counts the step, once it was applied or is to be skipped."""
        engine = self._engine
        number = engine.scale.number
        if not decision.empty:
            engine.update(decision)
        if not keep:
            # If a kernel has divided the gradients, it has divided those in `.grad`.
            self._record.note_step(decision)
        self._observers.stepped(Stepped(self, decision.skipped, number, optimizer=self))

    def _check_scaled(self) -> None:
        """Warns of a step with gradients that nobody has scaled."""
        # After `backward` and `zero_grad` they may be a combination of gradients that were kept.
        if not (self._record.warned or self._record.is_cleared):
            given = gradients.collect(self._record.info)
            if any(t.any() for group in given.dense_groups for t in group):
                self._warn(_NOTHING_SCALED)

    def _leave_out(self) -> bool:
        """Accounts for a step that is left out: counts it, if it would have been skipped."""
        decision = self._engine.decision_if_left_out()
        if decision is None or not bool(decision.skipped):
            return False
        self._notify_decided(decision)
        self._finish(decision._replace(apply=False), keep=True)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, as the inner optimizer does it.

        After a `backward` or an `unscale_` that found an overflow, the step is skipped by that.
        """
        record = self._record
        record.check_can_clear()
        is_counted = record.last_check is not None and self._leave_out()
        zero_grad(self.inner_optimizer, set_to_none)
        record.note_zero_grad(is_counted)

    def register_step_skipped_hook(
        self, hook: Callable[[LossScaleOptimizer], object]
    ) -> RemovableHandle:
        """Registers a function that is called with this optimizer after each skipped step.

        The step hooks of PyTorch run on applied steps only.

        Returns:
            A handle with a method `remove`.

        Raises:
            UnsupportedError: With `decide="device"`, because the host does not know the decision.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> handle = optimizer.register_step_skipped_hook(lambda _: print("skipped"))
            >>> optimizer.scale_loss((weight * torch.inf).sum()).backward()
            >>> optimizer.step()
            skipped
        """
        if self.decide == "device":
            raise UnsupportedError(
                "With decide='device' the host calls no hook: it does not know which steps are "
                "skipped. Leave `decide` out, or read optimizer.last_step_skipped."
            )
        return self._observers.add(SkippedStepHook(hook))

    def unscale_(self) -> bool | Tensor:
        """Divides the gradients in `.grad` by the loss scale, before `step`.

        For code that reads or changes gradients of `scale_loss(loss).backward()` before `step`:
        clipping, logging, SAM. `step` then neither divides nor checks them again. After
        `backward`, they are unscaled already. A second call does nothing, unless a loss was scaled
        in between.

        Returns:
            Whether the gradients are finite on all processes that skip together: a bool; with
            `decide="device"` a boolean tensor.

        Raises:
            GradientsError: If a parameter and its gradient have the dtype float16.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.scale_loss(weight.sum()).backward()
            >>> optimizer.unscale_(), weight.grad
            (True, tensor([1., 1.]))
        """
        decision = self._unscale_()
        return decision.overflow == 0 if decision.apply is None else decision.apply

    @uncompiled
    def _unscale_(self) -> StepDecision:
        """Unscales the gradients before the step, for code that reads or changes them."""
        record, engine = self._record, self._engine
        record.see_parameters()
        record.account_for_unseen_backward()
        if record.decision is not None:
            return record.decision
        decision: StepDecision = engine.decide(in_place=True)
        if decision.empty:
            # Gradients of a later `backward` still have to be divided.
            return decision
        info = record.info
        if decision.nobody_scaled:
            self._warn(_NOTHING_SCALED)
            if not info.is_given:
                return decision
        overflow = decision.skipped
        if not isinstance(overflow, Tensor):
            overflow = scalar(float(overflow), info.device)
        record.note_decision(decision, overflow)
        return decision

    def _notify_decided(self, decision: StepDecision) -> None:
        if decision.empty or not self._observers.have_monitor:
            return
        scale, groups = self._engine.scale, self.inner_optimizer.param_groups
        number, applied = scale.number, not bool(decision.skipped)
        now = scale.tensor if number is None else number
        self._observers.decided(Decided(groups, now, applied, decision.divisor))

    def _warn(self, message: str) -> None:
        if not self._record.warned:
            self._record.warned = True
            warn(message)

    # --- Properties ---------------------------------------------------------------------------

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, a 0-d float32 tensor."""
        return self._engine.scale.tensor

    @property
    def dynamic_counter(self) -> int | Tensor | None:
        """The finite steps since the scale last changed; None if the scale is fixed.

        An int; with `decide="device"` a 0-d tensor, like the counts below.
        """
        return (
            _copied(getattr(self._engine.scale.state, "good_steps", None)) if self.dynamic else None
        )

    @property
    def steps_skipped(self) -> int | Tensor:
        """The number of steps that were skipped so far."""
        return _copied(self._engine.scale.counts.steps_skipped)

    @property
    def last_step_skipped(self) -> bool | Tensor:
        """Whether the last step was skipped."""
        return _copied(self._engine.scale.counts.last_step_skipped)

    @property
    def iterations(self) -> int | Tensor:
        """The number of steps, skipped ones included. It can be set."""
        return _copied(self._engine.scale.counts.iterations)

    @iterations.setter
    def iterations(self, value: int | Tensor) -> None:
        scale = self._engine.scale
        state_dicts.restore(scale, {**scale.numbers(), "iterations": int(value)})

    @property
    def clip_norm(self) -> float | None:
        """The largest 2-norm of the unscaled gradients; None for no clipping. It can be set."""
        return self._engine.clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        self._engine.clip_norm = arguments.checked_clip_norm(value)

    @property
    def process_group(self) -> ranks.Groups:
        """The process group that was given, or None."""
        return self._record.process_group

    @property
    def decide(self) -> Literal["host", "device"]:
        """Whether the "host" or the "device" decides to skip a step."""
        return "device" if self._engine.scale.on_device else "host"

    def _is_on_host(self) -> bool:
        return self.decide == "host"

    # --- Saving and restoring -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer and of the loss scale.

        Returns:
            The dictionary of the inner optimizer. Its first parameter group also holds
            `loss_scale`, `loss_scale_good_steps`, `loss_scale_steps_skipped` and
            `loss_scale_iterations`, Python numbers. The inner optimizer can load it.

        Raises:
            CallOrderError: If gradients are scaled, between `scale_loss(loss).backward()` and
                `unscale_` or `step`.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.state_dict()["param_groups"][0]["loss_scale"]
            32768.0
        """
        self._take_loaded(self._inner, by_hook=False)
        self._record.check_can_be_saved()
        return state_dicts.with_numbers(self.inner_optimizer.state_dict(), self._engine.scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of a LossScaleOptimizer or of a plain optimizer returned.

        From a plain optimizer's state, the loss scale stays as it is. A saved loss scale outside
        the range of the rule is moved into it, with a warning.

        Args:
            state_dict: The dictionary; it is not changed.

        Raises:
            ValueError: If it does not match the parameter groups, or a value of the loss scale is
                not a number. Then nothing is changed.
            StateDictError: If it is not the state of an optimizer.
        """
        scale, inner = self._engine.scale, self.inner_optimizer
        rest, numbers = state_dicts.without_numbers(state_dict, scale, inner)
        self._record.see_parameters()
        inner.load_state_dict(rest)
        self._record.restart()
        state_dicts.restore(scale, numbers)

    def _check_load(self, state_dict: Mapping[str, Any]) -> None:
        """Checks, before the inner optimizer itself loads a state, a loss scale in it."""
        numbers = state_dicts.loaded_numbers(state_dict, self._engine.scale)
        if numbers and not self._record.no_loss_scaled():
            raise CallOrderError(
                "The inner optimizer was to load a loss scale between backward() and step(). Call "
                "load_state_dict() of the LossScaleOptimizer."
            )

    def _take_loaded(self, inner: Optimizer, *, by_hook: bool) -> None:
        """Takes over a loss scale that an inner optimizer itself has loaded.

        Args:
            inner: The optimizer.
            by_hook: Whether a hook of the load calls this. Some optimizers call none.
        """
        scale, whole = self._engine.scale, self._inner
        # A list takes them by its own hook: one of its optimizers may still fail to load.
        waits = inner is not whole and isinstance(whole, OptimizerList) and whole.is_loading
        if waits or not state_dicts.has_numbers(inner.param_groups):
            return
        numbers = state_dicts.take_numbers(scale, inner)
        if by_hook:
            self._record.restart()
            state_dicts.restore(scale, numbers)
        else:
            warn(
                "The loss scale in the state was not loaded: load_state_dict() of "
                f"{type(inner).__name__} calls no hooks. Call that of the LossScaleOptimizer."
            )

    @property
    def loss_scale_state(self) -> state_dicts.LossScaleState:
        """The state of the loss scale alone, an object with `state_dict` and `load_state_dict`.

        `StateDictOptions(flatten_optimizer_state_dict=True)` drops the loss scale from the
        optimizer's dictionary. Save `{"loss_scale": optimizer.loss_scale_state}` as well.
        """
        return state_dicts.LossScaleState(self._engine.scale)

    def __getstate__(self) -> dict[str, Any]:
        # Attributes that users have set as well; but not the methods that schedulers and trainers
        # have replaced, which refer to this optimizer.
        self._record.check_can_be_saved()
        engine = self._engine
        own = {
            name: value
            for name, value in self.__dict__.items()
            if not (name in _NOT_COPIED or hasattr(type(self), name))
        }
        made_of = engine.inner, engine.rule, engine.clip_norm, self.process_group, self.decide
        return {**own, "made_of": made_of, "numbers": engine.scale.numbers()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        inner, rule, clip_norm, process_group, decide = own.pop("made_of")
        scale = _new_scale(rule, inner, decide)
        state_dicts.restore(scale, own.pop("numbers"))
        self._start(Engine(inner, scale, clip_norm, process_group), own["name"])
        self.__dict__.update(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScaleOptimizer:
        copied: LossScaleOptimizer = object.__new__(type(self))
        memo[id(self)] = copied
        # Process groups are not copied: the copy talks to the same processes.
        memo[id(self.process_group)] = self.process_group
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


def wrapper_in(optimizer: object) -> Any:
    """Returns the optimizer that a trainer has wrapped."""
    attributes = getattr(optimizer, "__dict__", {})
    # LightningOptimizer copies the attributes of the optimizer, and keeps the original.
    for name in ("_optimizer", "optimizer"):
        if isinstance(attributes.get(name), LossScaleOptimizer):
            return attributes[name]
    return optimizer


_NOT_COPIED = frozenset(
    {"_engine", "_inner", "_record", "_rule", "_observers"}
    | {"_strategy", "_on_before_step", "_on_after_step"}
)
"""Attributes that each copy creates, and those that Lightning sets on an optimizer."""


def _copied(value: Number) -> Number:
    """A number, or a copy of a tensor."""
    return cast(Number, value.clone()) if isinstance(value, Tensor) else value


def _new_scale(rule: ScaleRule, inner: Optimizer, decide: str) -> LossScale:
    devices = dict.fromkeys(p.device for p in ranks.parameters_of(inner))
    return (DeviceLossScale if decide == "device" else LossScale)(rule, devices)


def _backpropagate(
    loss: Tensor,
    multiplier: Multiplier,
    gradient: Tensor | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Inputs,
) -> None:
    """Backpropagates a loss times a scale."""
    plain = type(loss) is Tensor and loss.dtype in WIDE and loss.requires_grad
    if plain and (gradient is not None or loss.numel() == 1):
        # The scale multiplies the first gradient in place of the loss: the graph gets no node.
        scale = multiplier.scale_on(loss.device).to(loss.dtype)
        seed = torch.ones_like(loss) * scale if gradient is None else gradient * scale
        loss.backward(seed, retain_graph, create_graph, inputs)
        return
    with torch.enable_grad():
        scaled = widened(loss) * multiplier.scale_on(loss.device)
    scaled.backward(gradient, retain_graph, create_graph, inputs)

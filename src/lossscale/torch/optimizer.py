"""The loss scale optimizer for PyTorch: `torch.optim.Optimizer` around another one."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from lossscale.arguments import rule_from_arguments
from lossscale.checks import checked_above_zero, checks_keywords
from lossscale.common.checks import check_not_wrapped, remember_wrapper, warned_at_floor
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    ArgumentTypeError,
    CallOrderError,
    GradientsError,
    UnsupportedError,
)
from lossscale.members import Wrapper
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.packages import warn
from lossscale.torch import fused, gradients, ranks
from lossscale.torch import state_dict as state_dicts
from lossscale.torch.documented_verbs import DocumentedVerbs
from lossscale.torch.engine import (
    CHECKED,
    NOTHING,
    SCALED,
    UNSCALED,
    Engine,
    StepDecision,
    StepState,
    remember_scaled,
    was_scaled,
)
from lossscale.torch.inner_settings import InnerSettings
from lossscale.torch.scaling import CPU, real_parts, scalar, widened
from lossscale.torch.several import Several, parts_of

_NOTHING_SCALED = (
    "step() was called, and no loss was scaled since the last one. The gradients are applied as "
    "they are, which is correct for float32 if nobody else has scaled the loss, such as a "
    "GradScaler or another LossScaleOptimizer; float16 gradients may have flushed to zero before. "
    "Pass the loss through scale_loss() of this optimizer before backward()."
)
_NOTHING_TO_UNSCALE = (
    "unscale_() was called, and no loss was scaled since the last step. The gradients stay as they "
    "are. Pass the loss through scale_loss() before backward()."
)


@FrontDoor.register
class LossScaleOptimizer(InnerSettings, DocumentedVerbs, Wrapper, torch.optim.Optimizer):
    """A PyTorch optimizer around another one, which trains in float16 with a loss scale.

    It is a `torch.optim.Optimizer`, with the parameter groups, the state and the hooks of the one
    inside. `step` divides the gradients, looks at them, applies them or skips the step, and moves
    the loss scale.

    Args:
        inner_optimizer: The `torch.optim.Optimizer` to wrap, an instance; or a list of them, which
            have one scale and are all stepped or none.
        dynamic: Whether the scale moves by itself. If False, `initial_scale` is the fixed scale
            and, unless a rule says otherwise, gradients are not checked.
        initial_scale: The first (or the fixed) loss scale, a dimensionless number from 2**-126
            to 2**126. None stands for 2**15.
        dynamic_growth_steps: How many finite steps in a row double the scale, in steps. None
            stands for 2000.
        rule: A `DynamicScale`, a `FixedScale` or a rule of your own, instead of the three
            arguments above.
        clip_norm: The largest 2-norm of all unscaled gradients together; larger ones are scaled
            down to it, as by `torch.nn.utils.clip_grad_norm_`. None for no clipping.
        process_group: A `torch.distributed.ProcessGroup`, or a list of them, whose processes skip
            a step together, beside the groups that are derived from parameters that are DTensors.
            With `DistributedDataParallel` none is needed; `[]` stands for none at all.
        decide: "host" or "device". On the host the verdict is waited for, so that a step that is
            skipped is not made, and nobody is told otherwise. On the device nothing is waited for:
            a fused optimizer is handed the verdict and skips by itself, and the step of any other
            is taken back, for the memory of its parameters and their state once more.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is no optimizer or already has loss scaling, `dynamic`
            is not a bool, or `rule` is no rule.
        ValueError: If a value cannot be used.

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

    _watcher: Any = None
    """The monitor that is told of each decision."""
    _warned_at_floor = False
    _sets_scale = (
        "Set it in the state: state = optimizer.state_dict(); "
        'state["param_groups"][0]["loss_scale"] = {value!r}; optimizer.load_state_dict(state)'
    )

    @checks_keywords("LossScaleOptimizer")
    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: Any = True,
        initial_scale: Any = None,
        dynamic_growth_steps: Any = None,
        *,
        rule: Any = None,
        clip_norm: float | None = None,
        process_group: Any = None,
        decide: str = "host",
        name: str | None = None,
    ) -> None:
        # `Optimizer.__init__` is not called: groups, state and hooks are those of the one inside.
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        if isinstance(inner_optimizer, (list, tuple)):
            for each in inner_optimizer:
                _check_inner(each, is_one_of_several=True)
            inner_optimizer = Several(list(inner_optimizer))
        _check_inner(inner_optimizer)
        if process_group is None:
            _check_not_in_zero()
        clip_norm = _checked_clip_norm(clip_norm)
        _check_decide(decide, inner_optimizer)
        engine = Engine(inner_optimizer, rule, clip_norm, process_group, decide == "device")
        state_dicts.restore(engine.scale, state_dicts.take_numbers(engine.scale, inner_optimizer))
        self._start(engine, name or "loss_scale_optimizer")

    def _start(self, engine: Engine, name: str) -> None:
        self._engine, self.name, self._rule = engine, name, engine.rule
        self._step_state = StepState()
        self._skipped_hooks: dict[int, Any] = OrderedDict()
        state_dicts.reserve_names(engine.scale, engine.inner)
        for each in {id(o): o for o in (engine.inner, *parts_of(engine.inner))}.values():
            remember_wrapper(each, self)
        self.inner_optimizer = engine.inner

    def __len__(self) -> int:
        return len(self.inner_optimizer)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner_optimizer)

    def __bool__(self) -> bool:
        # Whatever it has a length of.
        return True

    # --- Scale the loss -----------------------------------------------------------------------

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale, for `backward`.

        `step` divides the gradients again. Scale each loss of a step once.

        Args:
            loss: A tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider; for a callable, a callable.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> inner = torch.optim.SGD([weight], lr=0.5)
            >>> optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8)
            >>> optimizer.scale_loss(weight.sum())
            tensor(16., grad_fn=<MulBackward0>)
        """
        state = self._step_state
        if state.stage == CHECKED:
            self._step_not_made()
        state.stage, state.is_settled = SCALED, False
        return self._scaled(loss)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_not_made(self) -> None:
        """A loss is scaled for the next step, and the one that was decided on was not made."""
        state, gradients = self._step_state, self._gradients()
        parts = [part for each in gradients for part in real_parts(ranks.local(each))]
        if not any(part.any() for part in parts):
            # They are cleared, perhaps where they are.
            self._leave_out()
        elif state.decision.apply is not False:
            state.unscaled_before = {id(each): each._version for each in gradients}
            state.decision_before = state.decision

    def _gradients(self) -> list[Any]:
        parameters = ranks.parameters_of(self.inner_optimizer)
        return [p.grad for p in parameters if p.grad is not None]

    def _scaled(self, loss: Any) -> Any:
        if callable(loss) and not isinstance(loss, torch.Tensor):
            return lambda: self._scaled(loss())
        if isinstance(loss, torch.Tensor):
            if not torch.compiler.is_compiling() and was_scaled(loss):
                raise GradientsError(
                    "This loss is scaled already, and its gradients would be too large by the loss "
                    "scale. Call scale_loss() once."
                )
            # In compiled code too this is a tensor, never a number that it would be compiled for.
            scaled = widened(loss) * self._engine.scale.on(loss.device).scale
            if not torch.compiler.is_compiling():
                remember_scaled(scaled)
            return scaled
        try:
            number = float(loss)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                "The loss must be a tensor, a number, or a callable that returns one. Received: "
                f"{loss!r} of type {type(loss).__name__}. Of several losses scale the sum, or each "
                "by itself."
            ) from None
        return scalar(number, CPU) * self._engine.scale.on(CPU).scale

    # --- Step ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients of the scaled loss, or skips the step; then moves the loss scale.

        Gradients that `unscale_` has divided are applied as they are. So are those of a loss that
        nobody scaled; then the loss scale does not move. A step without any gradient is no step.

        Args:
            closure: A callable that evaluates the model, calls `scale_loss(loss).backward()` and
                returns the loss, which is not scaled. LBFGS evaluates it several times; where the
                gradients overflow, once more at a lower scale.

        Returns:
            What the step of the optimizer inside returns, or the loss of the closure.

        Raises:
            GradientsError: If a gradient is of float16, like its parameter. It is a `ValueError`.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.scale_loss(weight.sum()).backward()
            >>> optimizer.step()
            >>> weight.detach()
            tensor([0.5000, 0.5000])
        """
        # Compiled, it would be compiled anew for each number that it reads. The decorator alone
        # would do, and would take its time in every step that is not compiled.
        if torch.compiler.is_compiling():
            return self._step_uncompiled(closure)
        return self._take_step() if closure is None else self._step_with(closure)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_uncompiled(self, closure: Callable[[], Any] | None) -> Any:
        return self._take_step() if closure is None else self._step_with(closure)

    # PyTorch's own wrapper around a `step` would call global hooks for the one inside and for
    # this one.
    step.hooked = True  # type: ignore[attr-defined]

    def _take_step(self) -> Any:
        """Decides on the gradients as they are now, applies or skips them, moves the scale."""
        state, engine = self._step_state, self._engine
        if state.unscaled_before:
            self._check_not_mixed()
        if state.stage != CHECKED:
            nothing = state.stage == NOTHING
            if state.is_settled and nothing and not self._gradients():
                # `zero_grad` came in the place of this step.
                return state.reset()
            decision = engine.decide(are_scaled=None if nothing else self._are_scaled())
            if nothing and decision.stats is None:
                return self._step_as_given(decision)
            # If the optimizer raises, the gradients are unscaled already.
            state.decision, state.stage = decision, CHECKED
        decision = state.decision
        if decision.stats is None and not decision.empty:
            return self._step_as_given(decision)
        if state.clips and decision.apply is not False:
            engine.clip_()
        state.clips = False
        self._notify_watcher(decision)
        returned = engine.apply(decision)
        self._finish(decision)
        return returned

    def _finish(self, decision: StepDecision) -> None:
        """Moves the scale and counts the step, once it was applied or is to be skipped."""
        scale = None if self._engine.scale.on_device else self._engine.scale.number
        if not decision.empty:
            self._engine.update(decision)
        self._step_state.reset()
        if decision.apply is False:
            tell_accelerate()
            for hook in list(self._skipped_hooks.values()):
                hook(self)
            if scale is not None and self._watcher is None and not self._warned_at_floor:
                self._warned_at_floor = warned_at_floor(self.rule, scale)

    def _step_as_given(self, decision: StepDecision) -> Any:
        """A step whose loss nobody scaled: checkpointing makes such steps, with zero gradients."""
        if not self._step_state.warned:
            given = gradients.collect(self._engine.info())
            if any(t.any() for group in given.dense_groups for t in group):
                self._warn(_NOTHING_SCALED)
        is_step = not decision.empty and not fused.is_dummy_step(self.inner_optimizer)
        if is_step:
            self._notify_watcher(decision)
        returned = self._engine.apply(decision)
        if is_step or decision.apply is False:
            self._finish(decision)
        self._step_state.reset()
        return returned

    def _leave_out(self) -> None:
        """A step that was decided on is not made: it counts if it was to be skipped."""
        decision = self._step_state.decision
        if decision.is_skipped():
            self._notify_watcher(decision)
            self._finish(decision._replace(apply=False))

    def _check_not_mixed(self) -> None:
        """Checks that no `backward` has added to gradients that were unscaled before it.

        If nothing was added at all they are what they were: unscaled, and decided on.
        """
        state = self._step_state
        now = {id(each): each._version for each in self._gradients()}
        kept = state.unscaled_before.keys() & now
        if kept and now != state.unscaled_before:
            raise CallOrderError(
                "unscale_() was called before the last backward(), which has added scaled "
                "gradients to unscaled ones. Call unscale_() once for each step, after the last "
                "backward(). Now call zero_grad() of this optimizer."
            )
        if kept:
            state.decision, state.stage = state.decision_before, CHECKED
        state.unscaled_before = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, as the optimizer inside does it.

        After an `unscale_` that found an overflow, the step is skipped by that.
        """
        state = self._step_state
        if state.stage == CHECKED:
            self._leave_out()
            state.reset()
            state.is_settled = True
        state.unscaled_before = {}
        self.inner_optimizer.zero_grad(set_to_none=set_to_none)

    def register_step_skipped_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Registers what is called after each step that was skipped, with this optimizer.

        For what a pre- or post-hook of the step would do that is called for applied steps alone:
        counts that are reset, averages that are moved.

        Returns:
            A handle with a method `remove`.

        Raises:
            UnsupportedError: With `decide="device"`, where nobody waits for what was decided.

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
                "With decide='device' the host is not told which steps are skipped. Leave `decide` "
                "out, or read optimizer.last_step_skipped."
            )
        handle = RemovableHandle(self._skipped_hooks)
        self._skipped_hooks[handle.id] = hook
        return handle

    def unscale_(self) -> Any:
        """Divides the gradients by the loss scale where they are, before the step.

        For whoever reads or changes gradients between `backward` and `step`: clipping, logging,
        SAM. `step` then neither divides them again nor looks at them again. A second call does
        nothing, unless `scale_loss` was called in between.

        Returns:
            Whether all are finite: a bool; with `decide="device"` a boolean tensor.

        Raises:
            GradientsError: If a gradient is of float16, like its parameter. It is a `ValueError`.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.scale_loss(weight.sum()).backward()
            >>> optimizer.unscale_(), weight.grad
            (True, tensor([1., 1.]))
        """
        decision = self._unscale_(_NOTHING_TO_UNSCALE)
        return decision.overflow == 0 if decision.apply is None else decision.apply

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unscale_(self, warning: str) -> StepDecision:
        """Unscales the gradients before the step, for somebody who reads or changes them.

        Args:
            warning: What is said if no loss was scaled.
        """
        state = self._step_state
        if state.unscaled_before:
            self._check_not_mixed()
        if state.stage != CHECKED:
            nothing = state.stage == NOTHING
            decision: StepDecision = self._engine.decide(
                are_scaled=None if nothing else self._are_scaled(), in_place=True
            )
            if nothing and decision.stats is None:
                self._warn(warning)
                if not self._engine.info().is_given:
                    return decision
            if decision.empty:
                # What comes by a later `backward` is still to be divided.
                return decision
            state.decision = decision
            state.stage = CHECKED
            state.clips = self.clip_norm is not None and decision.stats is not None
        decided: StepDecision = state.decision
        return decided

    def _are_scaled(self) -> bool:
        """Whether the gradients of the parameters are those of the scaled loss."""
        if self._step_state.stage != UNSCALED:
            return True
        # `get_unscaled_gradients` returns new tensors. They may have been put in the place of the
        # gradients, or copied into them; or the gradients are as they were.
        versions = {id(tensor): version for tensor, version in self._step_state.divided}
        given = self._gradients()
        as_they_were = [versions.get(id(gradient)) == gradient._version for gradient in given]
        if any(as_they_were) and not all(as_they_were):
            raise GradientsError(
                "get_unscaled_gradients() was given the gradients of these parameters, and what "
                "it returned was put into the `.grad` of some and not of others. Put it into all, "
                "or call unscale_(), which divides them where they are."
            )
        return bool(given) and all(as_they_were)

    def _notify_watcher(self, decision: StepDecision) -> None:
        if self._watcher is None or decision.empty:
            return
        applied, scale = decision.apply, self._engine.scale
        self._watcher.decided(
            self.inner_optimizer.param_groups,
            scale=scale.tensor if scale.on_device else scale.number,
            applied=not decision.overflow.item() if applied is None else applied,
            divisor=decision.divisor,
        )

    def _warn(self, message: str) -> None:
        if not self._step_state.warned:
            self._step_state.warned = True
            warn(message)

    # --- Step with a closure ------------------------------------------------------------------

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """A step with a closure, which evaluates the model and calls `backward`.

        Most optimizers evaluate it once, at the beginning. Then it is evaluated here, so that the
        step can still be skipped. Others evaluate it many times, such as LBFGS in its line search.
        They need the gradients themselves each time, and no step can be skipped in their middle: an
        evaluation that overflows is made again at a lower scale.
        """
        if not callable(closure):
            raise ArgumentTypeError(
                "`closure` must be a callable that evaluates the model, calls backward() and "
                f"returns the loss. Received: {type(closure).__name__}. A loss is not passed to "
                "step(): call scale_loss(loss).backward() before it."
            )
        if fused.demands_closure(self.inner_optimizer):
            return self._step_evaluating(closure)
        with torch.enable_grad():
            loss = closure()
        self._take_step()
        return loss

    def _step_evaluating(self, closure: Callable[[], Any]) -> Any:
        """A step of an optimizer that evaluates the closure as often as it likes."""
        loss, decision = self._evaluate(closure)
        self._notify_watcher(decision)
        first = [loss]
        if decision.apply:
            loss = self.inner_optimizer.step(
                lambda: first.pop() if first else self._evaluate(closure)[0]
            )
        # Else no lower scale helps: it would put what is not finite into the parameters.
        self._finish(decision)
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, StepDecision]:
        """Evaluates a closure, at lower scales as long as that may help; unscales the gradients.

        Returns:
            What the closure returned, and the decision on the gradients.
        """
        scale, state = self._engine.scale, self._step_state
        while True:
            state.reset()
            with torch.enable_grad():
                loss = closure()
            self._check_returned(loss)
            decision = self._unscale_(_NOTHING_SCALED)
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            # Nothing was seen of gradients that are not scaled, and no lower scale helps them.
            if decision.apply or decision.stats is None or not math.isfinite(float(value)):
                break
            before = scale.number
            scale.update(decision.stats)
            if not scale.number < before:
                break
        if state.clips and decision.apply:
            self._engine.clip_()
            state.clips = False
        return loss, decision

    def _check_returned(self, loss: Any) -> None:
        if loss is None:
            raise ArgumentTypeError(
                f"The closure must return the loss: {type(self.inner_optimizer).__name__} looks at "
                "it. Received: None."
            )
        if was_scaled(loss):
            raise GradientsError(
                "The closure returned the scaled loss. Return the loss itself: "
                f"{type(self.inner_optimizer).__name__} compares it with gradients that are "
                "unscaled, and with losses at other scales."
            )

    # --- What can be read ---------------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        """The number that multiplies the loss now: a float32 scalar tensor."""
        return self._engine.scale.tensor

    @property
    def dynamic_counter(self) -> Any:
        """The finite steps since the scale last changed; None if the scale is fixed.

        An int; with `decide="device"` a scalar tensor, like the counts below.
        """
        return _own(getattr(self._engine.scale.state, "good_steps", None)) if self.dynamic else None

    @property
    def steps_skipped(self) -> Any:
        """The number of steps that were skipped so far."""
        return _own(self._engine.scale.counts.steps_skipped)

    @property
    def last_step_skipped(self) -> Any:
        """Whether the last step was skipped."""
        return _own(self._engine.scale.counts.last_step_skipped)

    @property
    def iterations(self) -> Any:
        """The number of steps, skipped ones included. It can be set."""
        return _own(self._engine.scale.counts.iterations)

    @iterations.setter
    def iterations(self, value: Any) -> None:
        scale = self._engine.scale
        scale.set_numbers({**scale.numbers(), "iterations": int(value)})

    @property
    def clip_norm(self) -> float | None:
        """The largest 2-norm of the unscaled gradients; None for no clipping. It can be set."""
        clip_norm: float | None = self._engine.clip_norm
        return clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        checked = _checked_clip_norm(value)
        self._engine.clip_norm = checked
        self._step_state.clips = self._step_state.clips and checked is not None

    @property
    def process_group(self) -> Any:
        """The process group that was given, or None."""
        return self._engine.process_group

    @property
    def decide(self) -> str:
        """Who decides on a step, "host" or "device"."""
        return "device" if self._engine.scale.on_device else "host"

    # --- Saving and making it again -----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside, with that of the loss scale in it.

        Returns:
            The dictionary of the optimizer inside. Its first parameter group has besides
            `loss_scale` (dimensionless), `loss_scale_good_steps`, `loss_scale_steps_skipped` and
            `loss_scale_iterations` (in steps): Python numbers. The optimizer inside can load it.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.state_dict()["param_groups"][0]["loss_scale"]
            32768.0
        """
        return state_dicts.with_numbers(self.inner_optimizer.state_dict(), self._engine.scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this or of the plain optimizer inside returned.

        Without the numbers of a loss scale the scale stays as it is. Others are brought into the
        range of the rule.

        Args:
            state_dict: The dictionary; it is not changed.

        Raises:
            ValueError: If it does not match the parameter groups, or a number of the loss scale is
                no number. Then nothing is changed.
            StateDictError: If it is no optimizer's. It is a `KeyError` and a `RuntimeError`.
        """
        scale, inner = self._engine.scale, self.inner_optimizer
        rest, numbers = state_dicts.without_numbers(state_dict, scale, inner)
        inner.load_state_dict(rest)
        state_dicts.restore(scale, numbers)
        state_dicts.reserve_names(scale, inner)

    @property
    def loss_scale_state(self) -> state_dicts.LossScaleState:
        """The state of the loss scale alone, an object with `state_dict` and `load_state_dict`.

        For checkpoints that flatten the optimizer's dictionary
        (`StateDictOptions(flatten_optimizer_state_dict=True)`), which loses the numbers: save
        `{"loss_scale": optimizer.loss_scale_state}` beside it.
        """
        return state_dicts.LossScaleState(self._engine.scale)

    def __getstate__(self) -> dict[str, Any]:
        # What a release of later needs to make it again; and attributes of the user's own, but not
        # the methods that schedulers and trainers replace by theirs, which refer to this optimizer.
        engine = self._engine
        own = {
            name: value
            for name, value in self.__dict__.items()
            if not (name in _OF_OTHERS or name in _MADE_AGAIN or hasattr(type(self), name))
        }
        return {
            **own,
            "inner_optimizer": engine.inner,
            "name": self.name,
            "rule": engine.rule,
            "clip_norm": engine.clip_norm,
            "process_group": engine.process_group,
            "decide": self.decide,
            "numbers": engine.scale.numbers(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        inner, rule, clip_norm, process_group, decide, name, numbers = map(state.pop, _PICKLED)
        engine = Engine(inner, rule, clip_norm, process_group, decide == "device")
        engine.scale.set_numbers(numbers)
        self._start(engine, name)
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = object.__new__(type(self))
        memo[id(self)] = copied
        # Process groups are not copied: the copy talks to the same processes.
        memo[id(self.process_group)] = self.process_group
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce__(self) -> Any:
        return _blank, (type(self),), self.__getstate__()


_PICKLED = "inner_optimizer", "rule", "clip_norm", "process_group", "decide", "name", "numbers"

_MADE_AGAIN = frozenset({"_engine", "_step_state", "_rule", "_skipped_hooks"})

_OF_OTHERS = frozenset({"_strategy", "_on_before_step", "_on_after_step"})
"""What Lightning puts on an optimizer."""


def _blank(cls: type[Any]) -> Any:
    """Returns an optimizer of a class that still has to be given its state."""
    return object.__new__(cls)


def _own(value: Any) -> Any:
    """A number, or a tensor that is nobody else's."""
    return value.clone() if torch.is_tensor(value) else value


def tell_accelerate() -> None:
    """Lets Accelerate's `step_was_skipped` say it of a step that was skipped in here.

    It sees the skips of a GradScaler alone. Its own schedules, EMAs and `policy.update()` ask it.
    """
    cls: Any = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    own = getattr(cls, "step_was_skipped", None)
    if isinstance(own, property) and own.fget and not hasattr(own.fget, "of_lossscale"):
        read = own.fget

        def step_was_skipped(accelerated: Any) -> bool:
            inside = accelerated.optimizer
            if isinstance(inside, LossScaleOptimizer):
                return bool(inside.last_step_skipped)
            return bool(read(accelerated))

        step_was_skipped.of_lossscale = True  # type: ignore[attr-defined]
        cls.step_was_skipped = property(step_was_skipped, doc=own.__doc__)


def _check_inner(inner: Any, is_one_of_several: bool = False) -> None:
    if isinstance(inner, FrontDoor):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap the optimizer inside it. Received: {inner!r}."
        )
    if not isinstance(inner, torch.optim.Optimizer):
        hint = " That is a class; call it." if isinstance(inner, type) else ""
        raise ArgumentTypeError(
            "The optimizer to wrap must be a torch.optim.Optimizer, an instance such as "
            "torch.optim.AdamW(model.parameters()), or a list of them. Received: "
            f"{inner!r} of type {type(inner).__name__}.{hint}"
        )
    check_not_wrapped(inner)
    fused.check_signature(inner)
    if is_one_of_several and fused.demands_closure(inner):
        raise UnsupportedError(
            f"{type(inner).__name__} evaluates a closure by itself, and cannot be one of several "
            "optimizers. Wrap it alone."
        )
    if any(group.get("differentiable") for group in inner.param_groups):
        raise UnsupportedError(
            "An optimizer with differentiable=True cannot be wrapped: its gradients are parts of a "
            "graph, and are unscaled in place. Make it with differentiable=False, or divide the "
            "gradients by the scale yourself."
        )


def _check_not_in_zero() -> None:
    """Refuses to be made by a `ZeroRedundancyOptimizer` for the part of one process."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.optim.zero_redundancy_optimizer":
            raise UnsupportedError(
                "A LossScaleOptimizer inside of a ZeroRedundancyOptimizer has a part of the "
                "parameters, and does not see the overflows of other processes. Wrap the "
                "ZeroRedundancyOptimizer, or pass process_group=torch.distributed.group.WORLD."
            )
        frame = frame.f_back


def _checked_clip_norm(value: Any) -> float | None:
    return None if value is None else checked_above_zero("clip_norm", value)


def _check_decide(decide: Any, inner: Any) -> None:
    if decide not in ("host", "device"):
        raise ArgumentError(f"`decide` must be 'host' or 'device'. Received: decide={decide!r}.")
    if decide == "host":
        return
    if not any(group["params"] for group in inner.param_groups):
        raise ArgumentError("decide='device' needs a parameter, whose device it is.")
    for part in parts_of(inner):
        if fused.demands_closure(part):
            raise ArgumentError(
                f"decide='device' cannot be with {type(part).__name__}, which evaluates a closure, "
                "and looks at each loss on the host. Leave `decide` out."
            )
        for group in part.param_groups:
            on_host = any(p.device.type == "cpu" for p in group["params"])
            if not fused.can_skip(part) and not group.get("capturable", True) and not on_host:
                raise ArgumentError(
                    "decide='device' needs an optimizer that keeps its step on the device. Make "
                    f"{type(part).__name__} with capturable=True or fused=True, or leave `decide` "
                    "out."
                )

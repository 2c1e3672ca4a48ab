"""Arguments of the wrapper and the scaler, and attributes of the inner optimizer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lossscale.arguments import checked_rule
from lossscale.checks import SMALLEST_SCALE, checked_above_zero, checked_number
from lossscale.common.wrapped import check_not_wrapped
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    ArgumentTypeError,
    GradientsError,
    ScalerArgumentError,
    UnknownSettingError,
    UnsupportedError,
)
from lossscale.members import Wrapper
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.registry import not_an_optimizer
from lossscale.rules import DynamicScale, ScaleRule
from lossscale.torch import fused, gradients, ranks
from lossscale.torch.backward import was_scaled
from lossscale.torch.gradient_record import ONE_FOR_SEVERAL
from lossscale.torch.optimizer_list import (
    OptimizerList,
    check_needs_no_closure,
    parts_of,
    with_parts,
)


def _of_inner(name: str) -> Any:
    """An attribute of the inner optimizer."""

    def set_(wrapper: InnerSettings, value: object) -> None:
        setattr(wrapper.inner_optimizer, name, value)

    doc = f"`{name}` of the inner optimizer."
    return property(lambda wrapper: getattr(wrapper.inner_optimizer, name), set_, doc=doc)


_CALLS = "Call optimizer.backward(loss), then optimizer.step()."
_BATCHES = "`Join` is not supported: give each process as many batches as the others."
_INSTEAD = {
    **dict.fromkeys(("minimize", "get_scaled_loss", "get_unscaled_gradients"), _CALLS),
    **dict.fromkeys(("apply_gradients", "get_gradients", "get_updates"), _CALLS),
    # An inner ZeroRedundancyOptimizer has them, and would step beside the loss scale.
    **dict.fromkeys(("join_hook", "join_device", "join_process_group"), _BATCHES),
}
"""Names that are not read from the inner optimizer, and what to do."""


class InnerSettings(Wrapper):
    """The inner optimizer's groups, hooks and methods."""

    _inner_attribute = "_inner"

    # Since Python 3.12 a protocol, such as Lightning's of an optimizer, sees what a class has.
    param_groups: list[dict[str, Any]] = _of_inner("param_groups")
    state: Any = _of_inner("state")
    defaults: dict[str, Any] = _of_inner("defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the inner optimizer.

        Args:
            param_group: A dictionary with `params`, and settings for them.
        """
        self.inner_optimizer.add_param_group(param_group)

    def _check_no_setting(self, name: str) -> None:
        setting = "lr" if name == "learning_rate" else name
        if setting == "lr" or any(setting in group for group in self.param_groups):
            raise UnknownSettingError(
                f"{name!r} is a setting of the parameter groups. Read or set "
                f"optimizer.param_groups[i][{setting!r}], as with any optimizer of PyTorch."
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):
            # The inner optimizer calls its hooks, once for each step that it takes.
            return getattr(self.inner_optimizer, name)
        if name in _INSTEAD and not hasattr(type(self), name):
            raise UnknownSettingError(
                f"LossScaleOptimizer has no `{name}` on PyTorch. {_INSTEAD[name]}"
            )
        try:
            value = super().__getattr__(name)
        except UnknownSettingError:
            # Otherwise a property of this class has raised it.
            if not hasattr(type(self), name):
                self._check_no_setting(name)
            raise
        if not (inspect.ismethod(value) or inspect.isfunction(value)):
            return value

        @functools.wraps(value)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            """First checks that `.grad` is unscaled."""
            self._check_unscaled(name)
            return value(*args, **kwargs)

        return guarded

    def __setattr__(self, name: str, value: object) -> None:
        inner = self.__dict__.get("_inner")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        # Schedulers replace `step`, a method, by one that counts its calls.
        if inner is None or own:
            object.__setattr__(self, name, value)
            return
        self._check_no_setting(name)
        if any(hasattr(part, name) for part in (*with_parts(inner), self._rule)):
            place = "optimizers[i]" if isinstance(inner, OptimizerList) else "inner_optimizer"
            raise UnknownSettingError(
                f"{name!r} belongs to the inner optimizer or to the rule, and is only read here. "
                f"Write optimizer.{place}.{name} = ..., or make the optimizer with another `rule`."
            )
        object.__setattr__(self, name, value)


# --- Arguments of the wrapper --------------------------------------------------------------------


def check_inner(inner: object) -> None:
    check_not_wrapped(inner, FrontDoor)
    if not isinstance(inner, Optimizer):
        raise ArgumentTypeError(not_an_optimizer(inner))
    check_needs_no_closure(inner)
    if any(group.get("differentiable") for group in inner.param_groups):
        raise UnsupportedError(
            "An optimizer with differentiable=True cannot be wrapped: its gradients belong to a "
            "graph, and the wrapper divides gradients in place. Make it with "
            "differentiable=False, or scale the loss and divide the gradients yourself."
        )


def check_processes(inner: Optimizer, process_group: object) -> None:
    """Refuses optimizers that communicate in `step`: if one process skips, the others hang."""
    for part in parts_of(inner):
        if type(part).__name__ == "PostLocalSGDOptimizer" and process_group is None:
            raise UnsupportedError(
                "PostLocalSGDOptimizer averages parameters over processes in its step: a process "
                "that skips a step alone would leave the others waiting. Pass "
                "process_group=torch.distributed.group.WORLD, or the group it averages over."
            )
        if getattr(part, "_overlap_with_ddp", False):
            raise UnsupportedError(
                "ZeroRedundancyOptimizer with overlap_with_ddp=True steps inside backward(), "
                "before all gradients are checked. Make it with overlap_with_ddp=False."
            )
    # By who calls: nothing else shows that only a part of the parameters is given.
    callers = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    if process_group is None and any("zero_redundancy_optimizer" in file for file in callers):
        raise UnsupportedError(
            "A LossScaleOptimizer inside a ZeroRedundancyOptimizer cannot see overflows of other "
            "processes. Wrap the ZeroRedundancyOptimizer, or make the LossScaleOptimizer with "
            "process_group=torch.distributed.group.WORLD."
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in ranks.parameters_of(inner)):
        raise UnsupportedError(
            "_apply_optimizer_in_backward steps these parameters inside backward(), before all "
            "gradients are checked. Wrap an optimizer of other parameters."
        )


def checked_clip_norm(value: float | None) -> float | None:
    return None if value is None else checked_above_zero("clip_norm", value)


def check_decide(decide: object, inner: Optimizer) -> None:
    if decide not in ("host", "device"):
        raise ArgumentError(f"`decide` must be 'host' or 'device'. Received: decide={decide!r}.")
    if decide == "host":
        return
    parameters = ranks.parameters_of(inner)
    if not parameters or any(p.is_meta for p in parameters):
        raise ArgumentError(
            "decide='device' keeps the loss scale on the device of the parameters. Received: an "
            "optimizer without parameters, or with some on the meta device. Make it after the "
            "model is materialized."
        )
    for part in parts_of(inner):
        if not fused.can_skip(part):
            raise UnsupportedError(
                f"decide='device' needs an optimizer that can skip its own step. This "
                f"{type(part).__name__} cannot. Make it with fused=True (and capturable=True for a "
                "CUDA graph) if it has that option, such as torch.optim.AdamW(parameters, "
                "fused=True), or leave `decide` out."
            )


def check_is_tensor(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(
            f"The loss must be a tensor. Received: {loss!r} of type {type(loss).__name__}. For "
            "several losses, pass their sum, or each of them."
        )


def check_not_scaled(loss: Tensor) -> None:
    if was_scaled(loss):
        raise GradientsError(
            "This loss is already scaled. Pass the unscaled loss, once, to backward() or "
            f"scale_loss(). If two optimizers train on it: {ONE_FOR_SEVERAL}"
        )


def check_backpropagated(loss: Tensor, info: ranks.ParameterInfo) -> None:
    check_is_tensor(loss)
    check_not_scaled(loss)
    if info.has_half:
        raise GradientsError(
            "A parameter has the dtype float16, in which unscaled gradients would flush to zero. "
            f"{gradients.IN_FLOAT32}"
        )


# --- Arguments of a gradient scaler ------------------------------------------------------------

DEFAULTS = DynamicScale(initial_scale=2.0**16, min_scale=SMALLEST_SCALE)
"""The defaults of PyTorch's scaler, and the lowest safe scale."""


@contextlib.contextmanager
def as_of_a_scaler() -> Iterator[None]:
    """Raises an `ArgumentError` as one that is also an `AssertionError`, as PyTorch's are."""
    try:
        yield
    except ArgumentError as error:
        raise ScalerArgumentError(str(error)) from None


def rule_of_a_scaler(rule: object, **numbers: Any) -> ScaleRule:
    """Returns the rule that the arguments describe.

    Args:
        rule: A rule, or None.
        numbers: By the names of `DynamicScale`; None for its limits stands for the widest.

    Raises:
        ScalerArgumentError: If a number cannot be used, or is given together with a rule.
        ArgumentTypeError: If `rule` is not a rule.
    """
    if rule is None:
        if numbers["min_scale"] is None:
            numbers["min_scale"] = DEFAULTS.min_scale
        with as_of_a_scaler():
            return DynamicScale(**numbers)
    checked = checked_rule(rule)
    usual = {**DEFAULTS.get_config(), "min_scale": None}
    given = {name: value for name, value in numbers.items() if value != usual[name]}
    if given:
        raise ScalerArgumentError(
            "`rule` already says how the scale moves; leave out what else does. Received: "
            f"rule={rule!r}, and {', '.join(f'{name}={value!r}' for name, value in given.items())}."
        )
    return checked


def new_scale_of(new_scale: object, rule: ScaleRule) -> float:
    """Returns the number that `update(new_scale)` sets.

    Args:
        new_scale: A number, or a tensor with one element that needs no gradient.
        rule: The rule, whose range it must lie in.

    Raises:
        ScalerArgumentError: If it is none of these.
    """
    if isinstance(new_scale, Tensor) and new_scale.requires_grad:
        raise ScalerArgumentError(f"`new_scale` requires a gradient. Received: {new_scale!r}.")
    with as_of_a_scaler():
        number = checked_number("new_scale", new_scale)
    if float(rule.restored(rule.init()._replace(scale=number)).scale) != number:
        raise ScalerArgumentError(
            f"`new_scale` must be a scale of the scaler's rule, {rule!r}. "
            f"Received: new_scale={new_scale!r}. Make the scaler with another `rule`, "
            "`min_scale` or `max_scale`."
        )
    return number


def check_steppable(optimizer: Any) -> None:
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

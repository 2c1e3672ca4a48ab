"""Keras on PyTorch: eager, with one wait for the decision in each step.

The rule runs on Python numbers, and only what has changed goes back to the device. Its own
operations would be some twenty kernels on scalars: a step of one variable would take 1.5 times as
long, one of two hundred 1.07.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.common.gradient_arguments import scaled_value
from lossscale.errors import GradientsError
from lossscale.keras.backends import Backend, check_without_tape, in_stateless_scope
from lossscale.keras_common.state import ScaleVariables
from lossscale.keras_common.step import OverflowCheck, Step
from lossscale.members import Wrapper
from lossscale.rules import ScaleRule, ScaleState, changed_fields
from lossscale.torch import gradients as torch_gradients
from lossscale.torch import scaling

_Saved = list[tuple[ft.Variable, Tensor]]
"""Variables, and their values at a time."""


class TorchBackend(Backend):
    """Keras on PyTorch."""

    # Functions of Keras take a few times as long in eager mode.
    namespace = torch
    scaled = staticmethod(scaling.scaled)
    unscaled = staticmethod(scaling.unscaled)
    all_finite = staticmethod(torch_gradients.all_finite)
    no_gradients = staticmethod(torch.no_grad)

    @staticmethod
    def new_overflow_tracker() -> Any:
        """Returns what tracks overflows for a monitor."""
        return registry.package("lossscale.torch.monitor").OverflowTracker()

    # --- One step -----------------------------------------------------------------------------

    def check(
        self, step: Step, rule: ScaleRule, inner: ft.KerasOptimizer, scale_variables: ScaleVariables
    ) -> OverflowCheck:
        """Unscales dense gradients in the pass that checks them, and waits for the decision."""
        # In two passes a step takes 1.3 (100 large variables) to 1.5 times (one) as long.
        if step.scale is None or not rule.powers_of_two or torch.compiler.is_compiling():
            check = super().check(step, rule, inner, scale_variables)
            return check._replace(all_finite=bool(check.all_finite))
        gradients, dense, others = list(step.gradients), [], []
        # With the list `gradients` itself, which is filled in below.
        unscaled = step._replace(gradients=gradients, scale=None)
        for index, gradient in enumerate(step.without_overwritten()):
            if gradient is None:
                if gradients[index] is not None:
                    others.append(gradients[index])
            elif gradient.dtype in scaling.WIDE and not gradient.is_sparse:
                dense.append(index)
            else:
                [gradients[index]] = self.unscaled([gradient], step.scale, True)
                others.append(gradients[index])
        if not dense:
            finite = not rule.checks_gradients or bool(self.all_finite(gradients))
            return OverflowCheck(finite, unscaled)
        # `.grad` belongs to the user.
        scaled = [gradients[index] for index in dense]
        copies = [torch.empty_like(each) for each in scaled]
        torch._foreach_copy_(copies, scaled)
        for index, copy in zip(dense, copies, strict=True):
            gradients[index] = copy
        scale = torch.as_tensor(step.scale, dtype=torch.float32, device=copies[0].device)
        given, reciprocal = torch_gradients.of_tensors(copies), scale.reciprocal()
        if not rule.checks_gradients:
            torch_gradients.unscale_(given, reciprocal.to)
            return OverflowCheck(True, unscaled)
        found = torch_gradients.unscale_and_check_(given, reciprocal.to)
        found_inf = torch_gradients.any_overflow(found.values(), scale.device)
        if others:
            found_inf = found_inf + torch.logical_not(self.all_finite(others)).to(found_inf)
        state = None
        if _host_can_update(scale_variables):
            overflowed = found_inf.item() != 0
            state = scale_variables.read_by(lambda variable: variable._value.item())
            may_grow = not state.scale >= 1.0
        else:
            # One number is read by the host.
            answer = int((found_inf > 0) + 2 * torch.logical_not(scale >= 1.0))
            overflowed, may_grow = bool(answer & 1), bool(answer & 2)
        if may_grow and not overflowed:
            # Dividing by a scale below 1 can overflow.
            overflowed = not bool(self.all_finite(copies))
        return OverflowCheck(not overflowed, unscaled, state)

    def apply_or_skip(
        self, optimizer: Wrapper, finite: ft.Scalar, step: Step, apply: Any, update_scale: Any
    ) -> None:
        """A Python `if`."""
        if bool(finite):
            apply(step.gradients, step.scale)
        update_scale(finite)

    def runs_now(self, gradients: ft.Gradients) -> bool:
        """Whether the step is not compiled."""
        return not torch.compiler.is_compiling()

    def update_on_host(
        self, optimizer: Wrapper, finite: ft.Scalar, state_on_host: ScaleState | None
    ) -> bool:
        """Updates the loss scale and the counters, on the host if it knows the decision."""
        state, skipped = optimizer._state, optimizer._steps_skipped._value
        if not _host_can_update(state):
            return False
        if state_on_host is None:
            if state.rule.checks_gradients:
                return False
        else:
            updates = changed_fields(state.rule, state_on_host, finite)
            for field, value in updates.items():
                state.variables[field]._value.fill_(value)
            optimizer._last_step_skipped._value.fill_(not finite)
            if not finite:
                skipped.add_(1)
        return True

    def run_guarded(
        self,
        models: Sequence[ft.Model],
        step: ft.Function,
        args: tuple[ft.Structure, ...],
        optimizers: Sequence[Wrapper],
        weights: ft.Variables,
    ) -> ft.Structure:
        """Copies the weights before the step."""
        before = _copied(weights)
        counts = _copied([optimizer._steps_skipped for optimizer in optimizers])
        result = step(*args)
        _put_back_if_moved(counts, before)
        return result

    def step_number(self, iterations: ft.Variable) -> None:
        """Returns None: the overflow tracker of PyTorch counts by itself."""

    # --- Variables and arrays -----------------------------------------------------------------

    def read(self, variable: ft.Variable) -> ft.Tensor:
        """A copy of a Keras variable's current value, because variables change in place."""
        return variable.value.detach().clone()

    def is_on_host(self, variable: ft.Variable) -> bool:
        """Whether nothing waits to read a variable."""
        return bool(variable.value.device.type == "cpu")

    def cast(self, gradient: Tensor, dtype: str) -> Tensor:
        """Returns a gradient, dense or sparse, in another dtype."""
        return gradient.to(getattr(torch, dtype))

    # --- Gradients of a loss ------------------------------------------------------------------

    def differentiate(
        self, loss: ft.Loss, var_list: ft.VarList, scale: ft.Function, tape: ft.Tape, grad_loss: Any
    ) -> tuple[list[ft.Gradient], list[ft.Variable]]:
        """Returns the gradients of a scaled loss, and the variables they belong to."""
        check_without_tape("PyTorch", var_list, tape)
        scaled_loss = scaled_value(loss, scale)
        variables = self.flat_variables(var_list() if callable(var_list) else var_list)
        if not scaled_loss.requires_grad:
            raise GradientsError(
                "The loss does not depend on any variable, so that it has no gradient."
            )
        if grad_loss is None and scaled_loss.ndim:
            grad_loss = torch.ones_like(scaled_loss)
        gradients = torch.autograd.grad(
            scaled_loss, [v.value for v in variables], grad_loss, allow_unused=True
        )
        return list(gradients), variables

    def symbolic_gradients(self, loss: Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        """Returns the gradients of a tensor, which knows how it was computed."""
        gradients, _ = self.differentiate(loss, list(variables), lambda value: value, None, None)
        return gradients


def _host_can_update(state: ScaleVariables) -> bool:
    """Whether the host updates the rule's state as the rule does on the device."""
    return (
        state.rule.exact_on_host
        # In a stateless scope, variables do not hold their values.
        and not in_stateless_scope()
        and not torch.compiler.is_compiling()
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # of PyTorch
def _copied(variables: ft.Variables) -> _Saved:
    return [(variable, variable.value.detach().clone()) for variable in variables]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # of PyTorch
def _put_back_if_moved(counts: _Saved, before: _Saved) -> None:
    if any(bool(counter.value != count) for counter, count in counts):
        for weight, value in before:
            weight.assign(value)


BACKEND = TorchBackend()

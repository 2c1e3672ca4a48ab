"""The verbs that TensorFlow documented: `minimize` and its parts, on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from lossscale.common.checks import NOT_UNSCALED, check_named, checked_pairs, flat_list, listed
from lossscale.errors import ArgumentError, ArgumentTypeError, GradientsError
from lossscale.members import Wrapper
from lossscale.torch import ranks
from lossscale.torch.engine import Engine
from lossscale.torch.gradient_record import GradientRecord
from lossscale.torch.scaling import CPU, unscaled


class DocumentedVerbs(Wrapper):
    """`minimize`, `get_scaled_loss`, `get_unscaled_gradients` and `apply_gradients`."""

    _record: GradientRecord
    _engine: Engine

    @overload
    def get_scaled_loss(self, loss: Tensor | float) -> Tensor: ...
    @overload
    def get_scaled_loss(self, loss: Callable[[], Tensor | float]) -> Callable[[], Tensor]: ...

    def get_scaled_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale, for gradients that you unscale yourself.

        Call `get_unscaled_gradients` afterwards. `backward` does both.

        Args:
            loss: A tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider; for a callable, a callable.
        """
        scaled = self._scaled(loss, seen=False)
        self._record.note_scaled_by_hand()
        return scaled

    def get_unscaled_gradients(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Divides gradients by the loss scale.

        Args:
            grads: Gradients of a loss from `get_scaled_loss`, tensors or None.

        Returns:
            A new list of the same length, in float32 or wider. None stays None, and sparse
            gradients stay sparse.

        Examples:
            >>> inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
            >>> optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8)
            >>> optimizer.get_unscaled_gradients([torch.tensor([4.0]), None])
            [tensor([0.5000]), None]
        """
        given = listed(grads)
        device = next((g.device for g in given if g is not None), CPU)
        scale = self._engine.scale.scale_on(device)
        result = unscaled(given, scale, self._rule.powers_of_two)
        self._record.note_unscaled_by_hand(given)
        return result

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
        name: str | None = None,
        *third: Any,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> int | Tensor:
        """Applies unscaled gradients to parameters, or skips the step; updates the loss scale.

        The `.grad` of the parameters does not change.

        Args:
            grads_and_vars: (gradient, parameter) pairs; a gradient may be None.
            name: Has no effect on PyTorch.
            *third: Must not be given; see `lossscale.LossScaleOptimizer`.
            skip_gradients_aggregation: Has no effect on PyTorch.
            experimental_aggregate_gradients: Has no effect on PyTorch.

        Returns:
            `iterations`, which has grown by 1, whether the step was applied or skipped.

        Raises:
            TypeError: If `grads_and_vars` does not hold pairs.
            ValueError: If no parameter has a gradient, a parameter is not one of the optimizer, or
                a shape does not match.
        """
        check_named(third)
        record = self._record
        given, variables = checked_pairs(grads_and_vars, _is_variable)
        parameters = ranks.parameters_of(self.inner_optimizer)
        _check_fit(given, variables, parameters)
        if record.by_hand:
            self._warn(NOT_UNSCALED)
        # Copies, because a step changes gradients in place.
        given = [
            None if gradient is None else gradient.detach().to(variable.dtype, copy=True)
            for gradient, variable in zip(given, variables, strict=True)
        ]
        with record.given_gradients(), _own_gradients(parameters):
            for gradient, variable in zip(given, variables, strict=True):
                if gradient is not None:
                    variable.grad = gradient
            self._take_step()
        iterations: int | Tensor = self.iterations
        return iterations

    def minimize(
        self,
        loss: Callable[[], Tensor],
        var_list: Sequence[Tensor] | Callable[[], Sequence[Tensor]] | None = None,
        grad_loss: Tensor | None = None,
        name: str | None = None,
        tape: None = None,
    ) -> int | Tensor:
        """Minimizes a loss: scales it, computes and unscales gradients, applies them.

        Calls `get_scaled_loss`, `get_unscaled_gradients` and `apply_gradients`, which a subclass
        may override. The `.grad` of the parameters does not change.

        Args:
            loss: A callable without arguments that returns the loss.
            var_list: The parameters to update, or a callable that returns them. None stands for
                all that require a gradient.
            grad_loss: Tensor of the loss's shape that multiplies its gradient, or None.
            name: Has no effect on PyTorch.
            tape: Must not be given.

        Returns:
            `iterations`.

        Raises:
            ValueError: If no parameter has a gradient.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.minimize(lambda: (weight**2).sum()), weight.detach()
            (1, tensor([0.]))
        """
        _check_minimized(loss, tape)
        if callable(var_list) and not isinstance(var_list, Tensor):
            var_list = var_list()
        variables = (
            [p for p in ranks.parameters_of(self.inner_optimizer) if p.requires_grad]
            if var_list is None
            else flat_list(var_list, list, _is_variable)
        )
        gradients = self._gradients_of(self.get_scaled_loss(loss), variables, grad_loss)
        unscaled_gradients = self.get_unscaled_gradients(gradients)
        self.apply_gradients(zip(unscaled_gradients, variables, strict=True))
        iterations: int | Tensor = self.iterations
        return iterations

    def _gradients_of(
        self,
        scaled_loss: Callable[[], Tensor],
        variables: Sequence[Tensor],
        grad_loss: Tensor | None,
    ) -> list[Tensor | None]:
        """Returns the gradients; the `.grad` of the variables does not change."""
        with _own_gradients(variables), torch.enable_grad():
            value = scaled_loss()
            if not value.requires_grad:
                raise GradientsError(
                    "The loss does not depend on any parameter, so it has no gradient. Compute it "
                    "with the model, without detach() or torch.no_grad()."
                )
            if grad_loss is None and value.ndim:
                grad_loss = torch.ones_like(value)
            # Not torch.autograd.grad, which skips the hooks that sum gradients over processes.
            # `fully_shard` computes with other tensors, and moves their gradients.
            inputs = None if any(map(ranks.is_spread, variables)) else list(variables)
            value.backward(gradient=grad_loss, inputs=inputs)
            return [variable.grad for variable in variables]


@contextlib.contextmanager
def _own_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Sets `.grad` of parameters to None, and restores it at the end of the context."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _check_minimized(loss: object, tape: object) -> None:
    if tape is not None:
        raise ArgumentError("`tape` is for TensorFlow. Leave it out.")
    if not callable(loss) or isinstance(loss, Tensor):
        raise ArgumentTypeError(
            "`loss` must be a callable without arguments that returns the loss, such as "
            f"lambda: loss_fn(model(x), y). Received: {type(loss).__name__}."
        )


def _is_variable(value: object) -> bool:
    return isinstance(value, Tensor)


def _check_fit(
    given: Sequence[Tensor | None], variables: Sequence[Tensor], parameters: Sequence[Tensor]
) -> None:
    known = set(map(id, parameters))
    for gradient, variable in zip(given, variables, strict=True):
        if id(variable) not in known:
            raise GradientsError(
                f"A variable of shape {tuple(variable.shape)} is in no parameter group of the "
                "optimizer. Add it with add_param_group, or leave it out."
            )
        if gradient is not None and gradient.shape != variable.shape:
            raise GradientsError(
                f"A gradient must have the shape of its variable, {tuple(variable.shape)}. "
                f"Received: {tuple(gradient.shape)}."
            )

"""The verbs that TensorFlow documented: `minimize` and its parts, on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lossscale.common.checks import check_named, checked_pairs, flat_list
from lossscale.errors import ArgumentError, ArgumentTypeError, GradientsError
from lossscale.torch import fused, ranks
from lossscale.torch.engine import SCALED, SCALED_BY_HAND, UNSCALED
from lossscale.torch.scaling import CPU, unscaled

_NOT_UNSCALED = (
    "get_scaled_loss() was called, and get_unscaled_gradients() was not, before "
    "apply_gradients(). The gradients are applied as they are: if nothing else divided them by "
    "the loss scale, this step is too large by that factor. Pass them through "
    "get_unscaled_gradients() first."
)


class DocumentedVerbs:
    """`minimize`, `get_scaled_loss`, `get_unscaled_gradients` and `apply_gradients`."""

    def get_scaled_loss(self, loss: Any) -> Any:
        scaled = self._scaled(loss)
        self._step_state.stage = SCALED_BY_HAND
        return scaled

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        try:
            given = list(grads)
        except TypeError:
            raise ArgumentTypeError(
                f"`grads` must be a list of gradients. Received: {grads!r}."
            ) from None
        device = next((g.device for g in given if g is not None), CPU)
        scale = self._engine.scale.on(device).scale
        result = unscaled(given, scale, self._rule.powers_of_two)
        self._step_state.stage = UNSCALED
        self._step_state.divided += [(g, g._version) for g in given if g is not None]
        return result

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *third: Any,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        check_named(third)
        state = self._step_state
        given, variables = checked_pairs(grads_and_vars, _is_variable)
        parameters = ranks.parameters_of(self.inner_optimizer)
        _check_fit(given, variables, parameters)
        if state.stage == SCALED_BY_HAND:
            self._warn(_NOT_UNSCALED)
        before = state.stage, state.divided
        with _own_gradients(parameters):
            for gradient, variable in zip(given, variables, strict=True):
                if gradient is not None:
                    # A copy, because what is applied is changed where it is.
                    variable.grad = gradient.detach().to(variable.dtype, copy=True)
            if state.stage != SCALED:
                state.stage, state.divided = UNSCALED, []
            try:
                self._take_step()
            except BaseException:
                state.reset()
                state.stage, state.divided = before
                raise
        return self.iterations

    def minimize(
        self,
        loss: Any,
        var_list: Any = None,
        grad_loss: Any = None,
        name: str | None = None,
        tape: Any = None,
    ) -> Any:
        if tape is not None:
            raise ArgumentError("`tape` is for TensorFlow. Leave it out.")
        if not callable(loss) or isinstance(loss, torch.Tensor):
            raise ArgumentTypeError(
                "`loss` must be a callable without arguments that returns the loss, such as "
                f"lambda: loss_fn(model(x), y). Received: {type(loss).__name__}."
            )
        if callable(var_list) and not isinstance(var_list, torch.Tensor):
            var_list = var_list()
        variables = (
            [p for p in ranks.parameters_of(self.inner_optimizer) if p.requires_grad]
            if var_list is None
            else flat_list(var_list, list, _is_variable)
        )
        if fused.demands_closure(self.inner_optimizer):

            def closure() -> Any:
                self.zero_grad()
                value = loss()
                _backward(self.scale_loss(value), grad_loss, variables)
                return value.detach()

            self.step(closure)
        else:
            gradients = self._gradients_of(self.get_scaled_loss(loss), variables, grad_loss)
            unscaled_gradients = self.get_unscaled_gradients(gradients)
            self.apply_gradients(zip(unscaled_gradients, variables, strict=True))
        return self.iterations

    def _gradients_of(
        self, scaled_loss: Callable[[], Any], variables: Sequence[Any], grad_loss: Any
    ) -> list[Any]:
        """Returns the gradients; the `.grad` of the variables stays as it was."""
        with _own_gradients(variables), torch.enable_grad():
            value = scaled_loss()
            if not value.requires_grad:
                raise GradientsError(
                    "The loss does not depend on any variable, so that it has no gradient."
                )
            if grad_loss is None and value.ndim:
                grad_loss = torch.ones_like(value)
            # And not torch.autograd.grad, which passes by what processes agree in.
            _backward(value, grad_loss, variables)
            return [variable.grad for variable in variables]

    # Of other parts.
    inner_optimizer: Any
    iterations: Any
    scale_loss: Any
    step: Any
    zero_grad: Any
    _engine: Any
    _rule: Any
    _scaled: Any
    _step_state: Any
    _take_step: Any
    _warn: Any


@contextlib.contextmanager
def _own_gradients(parameters: Sequence[Any]) -> Iterator[None]:
    """Within it parameters have no gradients but those that are set there."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _backward(value: Any, grad_loss: Any, variables: Sequence[Any]) -> None:
    """Backpropagates to some variables."""
    # `fully_shard` computes with other tensors, whose gradients it brings to the parameters.
    spread = any(ranks.is_spread(variable) for variable in variables)
    value.backward(gradient=grad_loss, inputs=None if spread else list(variables))


def _is_variable(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _check_fit(given: Sequence[Any], variables: Sequence[Any], parameters: Sequence[Any]) -> None:
    known = set(map(id, parameters))
    for gradient, variable in zip(given, variables, strict=True):
        if id(variable) not in known:
            raise GradientsError(
                f"A variable of shape {tuple(variable.shape)} is in no parameter group of the "
                "optimizer. Add it with add_param_group, or leave it out."
            )
        if gradient is not None and gradient.shape != variable.shape:
            raise GradientsError(
                f"A gradient has the shape {tuple(gradient.shape)}, and its variable "
                f"{tuple(variable.shape)}."
            )

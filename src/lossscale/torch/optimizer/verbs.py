"""The calls of a training loop: PyTorch's, and those of the documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lossscale.common.checks import checked_pairs, flat_list
from lossscale.errors import ArgumentError, ArgumentTypeError, GradientsError
from lossscale.torch import ranks, scaling
from lossscale.torch.optimizer import handing
from lossscale.torch.optimizer.closures import Closures
from lossscale.torch.optimizer.marks import JUDGED, SCALED, SCALED_BY_HAND, UNSCALED

_NOT_UNSCALED = (
    "get_scaled_loss() was called, and get_unscaled_gradients() was not, before "
    "apply_gradients(). The gradients are applied as they are: if nothing else divided them by "
    "the loss scale, this step is too large by that factor. Pass them through "
    "get_unscaled_gradients() first."
)
_NOT_STEPPED = (
    "unscale_() found gradients that are not finite, and step() was not called after it. So the "
    "loss scale stays as it is, and overflows again. Call step() all the same: it skips the step "
    "and lowers the scale."
)


class Verbs(Closures):
    """`scale_loss`, `unscale_`, and the documented `minimize` and its parts."""

    def scale_loss(self, loss: Any) -> Any:
        scaled = self._scaled(loss)
        marks = self._marks
        if marks.stage == JUDGED and marks.verdict.applied is False:
            self._warn(_NOT_STEPPED)
        marks.stage = SCALED
        return scaled

    def get_scaled_loss(self, loss: Any) -> Any:
        scaled = self._scaled(loss)
        self._marks.stage = SCALED_BY_HAND
        return scaled

    def _scaled(self, loss: Any) -> Any:
        if callable(loss) and not isinstance(loss, torch.Tensor):
            return lambda: self._scaled(loss())
        if isinstance(loss, torch.Tensor):
            # In compiled code too this is a tensor, never a number that it would be compiled for.
            scale = self._scales.factors(loss.device).scale
            if torch.compiler.is_compiling():
                return scaling.widened(loss) * scale
            if self._marks.was_scaled(loss):
                raise GradientsError(
                    "This loss is scaled already, and its gradients would be too large by the loss "
                    "scale. Call scale_loss() once."
                )
            scaled = scaling.widened(loss) * scale
            self._marks.remember(scaled)
            return scaled
        try:
            number = float(loss)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                "The loss must be a tensor, a number, or a callable that returns one. Received: "
                f"{loss!r} of type {type(loss).__name__}. Of several losses scale the sum, or each "
                "by itself."
            ) from None
        return torch.tensor(number) * self._scales.factors(torch.device("cpu")).scale

    def unscale_(self) -> Any:
        """Divides the gradients by the loss scale where they are, before the step.

        For whoever reads or changes gradients between `backward` and `step`: clipping, logging,
        SAM. `step` then neither divides them again nor looks at them again. A second call does
        nothing, unless `scale_loss` was called in between.

        Returns:
            Whether all are finite: a bool; with `decide="device"` a boolean tensor.

        Raises:
            GradientsError: If a gradient is of float16, like its parameter. It is a `ValueError`.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.scale_loss(weight.sum()).backward()
            >>> optimizer.unscale_(), weight.grad
            (True, tensor([1., 1.]))
        """
        verdict = self._divide_in_place()
        return verdict.found == 0 if verdict.applied is None else verdict.applied

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        try:
            given = list(grads)
        except TypeError:
            raise ArgumentTypeError(
                f"`grads` must be a list of gradients. Received: {grads!r}."
            ) from None
        device = next((g.device for g in given if g is not None), torch.device("cpu"))
        scale = self._scales.factors(device).scale
        unscaled = scaling.unscaled(given, scale, self._rule.powers_of_two)
        self._marks.stage = UNSCALED
        self._marks.divided += [(g, g._version) for g in given if g is not None]
        return unscaled

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        marks = self._marks
        given, variables = checked_pairs(grads_and_vars, _is_variable)
        parameters = [p for group in self.inner_optimizer.param_groups for p in group["params"]]
        _check_fit(given, variables, parameters)
        if marks.stage == SCALED_BY_HAND:
            self._warn(_NOT_UNSCALED)
        kept = [(p, p.grad) for p in parameters]
        before = marks.stage, marks.divided
        try:
            for parameter in parameters:
                parameter.grad = None
            for gradient, variable in zip(given, variables, strict=True):
                if gradient is not None:
                    # A copy, because what is applied is changed where it is.
                    variable.grad = gradient.detach().to(variable.dtype, copy=True)
            if marks.stage != SCALED:
                marks.stage, marks.divided = UNSCALED, []
            self._take_step()
        except BaseException:
            marks.reset()
            marks.stage, marks.divided = before
            raise
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
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
        groups = self.inner_optimizer.param_groups
        variables = (
            [p for group in groups for p in group["params"] if p.requires_grad]
            if var_list is None
            else flat_list(var_list, list, _is_variable)
        )
        if handing.demands_closure(self.inner_optimizer):
            self._minimize_evaluating(loss, variables, grad_loss)
        else:
            gradients = self._gradients_of(self.get_scaled_loss(loss), variables, grad_loss)
            self.apply_gradients(zip(gradients, variables, strict=True))
        return self.iterations

    def _minimize_evaluating(
        self, loss: Callable[[], Any], variables: Sequence[Any], grad_loss: Any
    ) -> None:
        def closure() -> Any:
            self.zero_grad()
            value = loss()
            _backward(self.scale_loss(value), grad_loss, variables)
            return value.detach()

        self.step(closure)

    def _gradients_of(
        self, scaled_loss: Callable[[], Any], variables: Sequence[Any], grad_loss: Any
    ) -> list[Any]:
        """Returns unscaled gradients; the `.grad` of the variables stays as it was."""
        kept = [(variable, variable.grad) for variable in variables]
        try:
            for variable in variables:
                variable.grad = None
            with torch.enable_grad():
                value = scaled_loss()
                if not value.requires_grad:
                    raise GradientsError(
                        "The loss does not depend on any variable, so that it has no gradient."
                    )
                if grad_loss is None and value.ndim:
                    grad_loss = torch.ones_like(value)
                # And not torch.autograd.grad, which passes by what processes agree in.
                _backward(value, grad_loss, variables)
            given = [variable.grad for variable in variables]
        finally:
            for variable, gradient in kept:
                variable.grad = gradient
        return self.get_unscaled_gradients(given)

    # Of other parts.
    iterations: Any
    step: Any
    zero_grad: Any


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

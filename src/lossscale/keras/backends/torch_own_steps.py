"""PyTorch: as the step is written, after which variables and their `grad` are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch

from lossscale.diagnostics.measurement import Derived
from lossscale.diagnostics.tapping import replaced
from lossscale.keras.backends.own_steps import dtype_of, state_of
from lossscale.torch.scaling import scaled, unscaled


def runner(
    step: Callable[..., Any],
    new_recorder: Callable[..., Any],
    model: Any,
    optimizers: Sequence[Any],
    *,
    eager: bool,
    helped: bool,
) -> Callable[[Any, float], tuple[list[Derived], Any]]:
    """Returns what takes data and a scale, and gives the gradients that a step is taken with.

    Args:
        step: Runs the `train_step` with a recorder, on data.
        new_recorder: Makes a recorder for a scale.
        model: The model.
        optimizers: Its optimizers.
        eager: Not used: it is always.
        helped: Whether to scale the loss of a step that does not do so itself.
    """
    del eager
    variables = list(model.trainable_variables)

    def run(data: Any, scale: float) -> tuple[list[Derived], Any]:
        recorder = new_recorder(scale)
        scaling = _scaling_derivatives(recorder) if helped else contextlib.nullcontext()
        tensors = keras.tree.map_structure(_to_tensor, data)
        # Each run draws the same random numbers.
        with (
            torch.random.fork_rng(),
            torch.enable_grad(),
            _put_back(state_of(model, optimizers)),
            scaling,
        ):
            step(recorder, tensors)
        derived = [
            Derived(place, dtype_of(variable), _together(given), 0)
            for place, (variable, given) in enumerate(zip(variables, recorder.given, strict=True))
        ]
        recorder.let_go()
        return derived, recorder

    return run


@contextlib.contextmanager
def _put_back(variables: Sequence[Any]) -> Iterator[None]:
    """After it variables have the values, and the gradients, that they had before."""
    tensors = [variable._value for variable in variables]
    before = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, value, gradient in before:
            tensor.data.copy_(value)
            tensor.grad = gradient


@contextlib.contextmanager
def _scaling_derivatives(recorder: Any) -> Iterator[None]:
    """Within it gradients by trained variables are taken of a scaled loss, and divided."""
    parameters = [variable._value for variable in recorder.variables]
    trained = {id(parameter) for parameter in parameters}
    backwards, take = torch.autograd.backward, torch.autograd.grad

    def larger(outputs: Any, given: Any) -> list[Any]:
        tensors, weights = _listed(outputs), _listed(given)
        weights += [None] * (len(tensors) - len(weights))
        ones = [
            torch.ones_like(tensor) if weight is None else weight
            for tensor, weight in zip(tensors, weights, strict=True)
        ]
        return [scaled(each, recorder.scale).to(each.dtype) for each in ones]

    def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
        recorder.helped += 1
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        backwards(_listed(tensors), larger(tensors, grad_tensors), *rest, **named)
        for parameter, earlier in zip(parameters, before, strict=True):
            if parameter.grad is None:
                parameter.grad = earlier
                continue
            [divided] = unscaled([parameter.grad], recorder.scale, True)
            divided = divided.to(parameter.dtype)
            parameter.grad = divided if earlier is None else earlier + divided

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *rest: Any, **named: Any) -> Any:
        if not all(id(each) in trained for each in _listed(inputs)):
            # Of a penalty, which is a part of the loss.
            return take(outputs, inputs, grad_outputs, *rest, **named)
        recorder.helped += 1
        found = take(_listed(outputs), inputs, larger(outputs, grad_outputs), *rest, **named)
        return tuple(unscaled(found, recorder.scale, True))

    with (
        replaced(torch.autograd, "backward", backward),
        replaced(torch.autograd, "grad", grad),
    ):
        yield


def _listed(tensors: Any) -> list[Any]:
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _together(given: Sequence[Any]) -> Any:
    """The gradients of one variable as one tensor."""
    if len(given) < 2:
        return given[0] if given else None
    return torch.cat([gradient.flatten() for gradient in given])


def _to_tensor(array: Any) -> Any:
    return None if array is None else keras.ops.convert_to_tensor(array)

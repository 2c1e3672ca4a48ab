"""Gradients, variables and losses as a wrapper gets them: checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from lossscale.errors import ArgumentTypeError, GradientsError, MalformedGradientsError
from lossscale.framework_types import Loss, Structure, Tensor

# Those of each framework.
_Gradient = TypeVar("_Gradient")
_Variable = TypeVar("_Variable")


def check_some_gradient(gradients: Sequence[object]) -> None:
    if all(gradient is None for gradient in gradients):
        raise GradientsError(
            "No gradients provided for any variable. Received: "
            f"{'an empty list' if not gradients else f'{len(gradients)} times None'}. Check that "
            "the loss depends on the variables and that the tape watched them."
        )


def listed(grads: Iterable[_Gradient]) -> list[_Gradient]:
    """Returns gradients as a list.

    Raises:
        ArgumentTypeError: If they are not iterable.
    """
    try:
        return list(grads)
    except TypeError:
        raise ArgumentTypeError(
            f"`grads` must be a list of gradients. Received: {grads!r}."
        ) from None


def checked_pairs(
    grads_and_vars: Iterable[tuple[_Gradient, _Variable]], is_variable: Callable[[object], bool]
) -> tuple[list[_Gradient], list[_Variable]]:
    """Returns the gradients and the variables of (gradient, variable) pairs.

    Raises:
        MalformedGradientsError: If they are not such pairs.
        GradientsError: If no variable has a gradient.
    """
    try:
        pairs: list[tuple[Any, ...]] = [tuple(pair) for pair in grads_and_vars]
    except TypeError:
        pairs = [(grads_and_vars,)]
    for pair in pairs:
        if len(pair) != 2 or not is_variable(pair[1]):
            raise MalformedGradientsError(
                "`grads_and_vars` must hold (gradient, variable) pairs, as in "
                f"zip(gradients, variables). Received: {pair!r}."
            )
    gradients = [gradient for gradient, _ in pairs]
    check_some_gradient(gradients)
    return gradients, [variable for _, variable in pairs]


def with_gradient(gradients: Sequence[object], variables: Sequence[_Variable]) -> list[_Variable]:
    """Returns the variables that have a gradient."""
    pairs = zip(gradients, variables, strict=False)
    return [variable for gradient, variable in pairs if gradient is not None]


def scaled_value(loss: Loss, scale: Callable[[Loss], Loss]) -> Tensor:
    """Scales a loss that is a tensor, or a callable that returns one."""
    scaled = scale(loss)
    return scaled() if callable(scaled) else scaled


def flat_list(
    variables: Structure,
    flatten: Callable[[Structure], list[_Variable]],
    is_variable: Callable[[object], bool],
) -> list[_Variable]:
    """Returns a list of variables from one variable or a nest of them.

    Raises:
        GradientsError: If something in it is not a variable.
    """
    found = [variables] if is_variable(variables) else flatten(variables)
    for variable in found:
        if not is_variable(variable):
            raise GradientsError(
                "`var_list` must hold variables, such as model.trainable_variables. "
                f"Received: {variable!r} of type {type(variable).__name__}."
            )
    return found


def check_named(third: Sequence[object]) -> None:
    """Checks that `apply_gradients` was called without a third positional argument.

    Raises:
        ArgumentTypeError: If there is one.
    """
    if third:
        raise ArgumentTypeError(
            "apply_gradients() takes two positional arguments. The third was "
            "experimental_aggregate_gradients in TensorFlow 2.2 to 2.10, and is its opposite, "
            "skip_gradients_aggregation, in later optimizers. Write apply_gradients(pairs, name, "
            f"experimental_aggregate_gradients={bool(third[0])}) for the older meaning. "
            f"Received: {third[0]!r}."
        )

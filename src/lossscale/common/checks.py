"""Checks that every wrapper runs before anything changes."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentTypeError,
    GradientsError,
    MalformedGradientsError,
)
from lossscale.framework_types import Loss, Structure, Tensor
from lossscale.monitoring.record import advice_at_floor
from lossscale.packages import warn
from lossscale.rules import DynamicScale, ScaleRule

# Those of each framework.
_Gradient = TypeVar("_Gradient")
_Variable = TypeVar("_Variable")

NOT_UNSCALED = (
    "get_scaled_loss() was called, and get_unscaled_gradients() was not, before "
    "apply_gradients(). The gradients are applied as they are: if nothing else divided them by "
    "the loss scale, this step is too large by that factor. Pass them through "
    "get_unscaled_gradients() first."
)
"""The warning of an `apply_gradients` whose gradients may still be scaled."""

# By identity: an optimizer may be unhashable, or equal to another one.
_wrappers: dict[int, tuple[weakref.ref[object], weakref.ref[object]]] = {}


def living_wrapper(inner: object) -> Any:
    """Returns the living wrapper of an optimizer, or None."""
    found = _wrappers.get(id(inner))
    return found[1]() if found is not None and found[0]() is inner else None


def check_not_wrapped(inner: object, wrappers: type | tuple[type, ...] = ()) -> None:
    """Checks that an optimizer has no loss scaling and no living wrapper.

    Args:
        inner: The optimizer.
        wrappers: The framework's own class of loss scale optimizers, if it has one.

    Raises:
        AlreadyWrappedError: If it has.
    """
    if isinstance(inner, wrappers):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap its inner optimizer. Received: {inner!r}."
        )
    wrapper = living_wrapper(inner)
    if wrapper is not None:
        raise AlreadyWrappedError(
            f"Another {type(wrapper).__name__} already wraps this {type(inner).__name__}. Use that "
            "one, or make a new optimizer to wrap."
        )


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


def takes(function: Callable[..., object], name: str) -> bool:
    """Whether a function has an argument of this name, or takes any."""
    arguments = signature_of(function)
    return name in arguments or any(each.kind == each.VAR_KEYWORD for each in arguments.values())


def signature_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The arguments of a function by name; those of a method are read once, with `self`."""
    method = getattr(function, "__func__", None)
    return inspect.signature(function).parameters if method is None else _arguments(method)


# Only of methods, which live as long as their class.
@functools.lru_cache
def _arguments(method: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method).parameters


def scaled_value(loss: Loss, scale: Callable[[Loss], Loss]) -> Tensor:
    """Scales a loss that is a tensor, or a callable that returns one."""
    scaled = scale(loss)
    return scaled() if callable(scaled) else scaled


def remember_wrapper(inner: object, wrapper: object) -> None:
    """Records that `wrapper` wraps `inner`, as long as the wrapper lives."""
    key = id(inner)
    _wrappers[key] = weakref.ref(inner, lambda _: _wrappers.pop(key, None)), weakref.ref(wrapper)


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


def warned_at_floor(rule: ScaleRule, scale: float, *, takes_rules: bool = True) -> bool:
    """Warns if a step was skipped at the minimum scale.

    Args:
        rule: The rule.
        scale: The loss scale of the step.
        takes_rules: Whether a rule can be passed, as to all but a gradient scaler.

    Returns:
        Whether it warned.
    """
    if not isinstance(rule, DynamicScale) or scale > rule.min_scale:
        return False
    warn(
        f"A step was skipped at the minimum loss scale, {scale:g}: a gradient is not finite, and "
        f"the scale cannot fall further. {advice_at_floor(scale, takes_rules=takes_rules)} "
        "explain() names the operation that fails, a monitor the gradients, and diagnose() says "
        "whether another scale helps."
    )
    return True


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

"""Checks of what an optimizer is given, for every shell, made before anything changes."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lossscale.errors import (
    AlreadyWrappedError,
    GradientsError,
    MalformedGradientsError,
    UnknownSettingError,
)

_wrappers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def living_wrapper(inner: Any) -> Any:
    """Returns the optimizer that has this one inside, None if no living one has."""
    return _wrappers.get(inner, lambda: None)()


def check_not_wrapped(inner: Any) -> None:
    """Checks that no living optimizer has this one inside.

    Raises:
        AlreadyWrappedError: If one has. It is a `TypeError` and a `ValueError`.
    """
    wrapper = living_wrapper(inner)
    if wrapper is not None:
        raise AlreadyWrappedError(
            f"This {type(inner).__name__} is already wrapped by another LossScaleOptimizer "
            f"({wrapper.name!r}), and two of them would both move it. Use that one, or make a "
            "new optimizer to wrap."
        )


def check_some_gradient(gradients: Sequence[Any]) -> None:
    if all(gradient is None for gradient in gradients):
        raise GradientsError(
            "No gradients provided for any variable. Received: "
            f"{'an empty list' if not gradients else f'{len(gradients)} times None'}. Check that "
            "the loss depends on the variables and that the tape watched them."
        )


def checked_pairs(
    grads_and_vars: Any, is_variable: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients and the variables of (gradient, variable) pairs.

    Raises:
        MalformedGradientsError: If they are no such pairs. It is a `TypeError`.
        GradientsError: If no variable has a gradient. It is a `ValueError`.
    """
    try:
        pairs = [tuple(pair) for pair in grads_and_vars]
    except TypeError:
        pairs = [()]
    if any(len(pair) != 2 for pair in pairs):
        raise MalformedGradientsError(
            "`grads_and_vars` must hold (gradient, variable) pairs, as in "
            "zip(gradients, variables). "
            f"Received: {grads_and_vars!r} of type {type(grads_and_vars).__name__}."
        )
    for _, variable in pairs:
        if not is_variable(variable):
            raise MalformedGradientsError(
                "The second item of every pair in `grads_and_vars` must be a variable. "
                f"Received: {variable!r} of type {type(variable).__name__}."
            )
    gradients = [gradient for gradient, _ in pairs]
    check_some_gradient(gradients)
    return gradients, [variable for _, variable in pairs]


def remember_wrapper(inner: Any, wrapper: Any) -> None:
    """Notes that `wrapper` moves `inner`, for as long as the wrapper lives."""
    _wrappers[inner] = weakref.ref(wrapper)


def flat_list(
    variables: Any, flatten: Callable[[Any], list[Any]], is_variable: Callable[[Any], bool]
) -> list[Any]:
    """Returns a list of variables from one variable or a nest of them.

    Raises:
        GradientsError: If something in it is no variable. It is a `ValueError`.
    """
    found = [variables] if is_variable(variables) else flatten(variables)
    for variable in found:
        if not is_variable(variable):
            raise GradientsError(
                "`var_list` must hold variables, such as model.trainable_variables. "
                f"Received: {variable!r} of type {type(variable).__name__}."
            )
    return found


def unknown_setting(wrapper: type[Any], inner: Any, name: str) -> UnknownSettingError:
    """Returns the error for a name that neither the wrapper nor the optimizer inside it has."""
    known = {n for n in (*dir(wrapper), *dir(inner)) if n[0] != "_"}
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UnknownSettingError(
        f"Neither the loss scale optimizer nor the {type(inner).__name__} "
        f"inside it has a setting {name!r}.{hint}"
    )

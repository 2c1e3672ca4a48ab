"""What the engines of several backends share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from lossscale.errors import ArgumentTypeError, GradientsError


class Place(NamedTuple):
    """Where in a program a call is made.

    Attributes:
        graph: The graph being traced, None where there is none.
        replicas: The numbers of the replicas it is made for.
    """

    graph: Any
    replicas: tuple[int, ...]


def only_place() -> Place:
    """The place of every call where functions are traced whole and nothing is replicated."""
    return Place(graph=None, replicas=(0,))


def outside_traces() -> contextlib.AbstractContextManager[None]:
    """Within it variables are set now and once, also where a function is being traced."""
    return contextlib.nullcontext()


def is_keras_variable(value: Any) -> bool:
    """Whether `value` is a Keras variable."""
    return isinstance(value, keras.Variable)


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


def flat_keras_variables(variables: Any) -> list[Any]:
    """Returns a list of Keras variables from one or a nest of them."""
    return flat_list(variables, keras.tree.flatten, is_keras_variable)


def aggregation_name(aggregation: Any) -> str:
    """Returns Keras' name of an aggregation over replicas, from it or from an enumeration."""
    name = getattr(aggregation, "name", aggregation)
    if isinstance(name, str) or name is None:
        return (name or "none").lower()
    raise ArgumentTypeError(
        "`aggregation` must be a tf.VariableAggregation or its name, such as 'none' or 'mean'. "
        f"Received: aggregation={aggregation!r}."
    )

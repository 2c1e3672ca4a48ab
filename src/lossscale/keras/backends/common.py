"""What several backends share."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from lossscale.common.checks import flat_list
from lossscale.common.handover import Place
from lossscale.errors import ArgumentTypeError


def only_place() -> Place:
    """The place of every call where functions are traced whole and nothing is replicated."""
    return Place(graph=None, replicas=(0,))


def check_strategy() -> None:
    """Nothing to check: only TensorFlow has strategies."""


def outside_traces() -> contextlib.AbstractContextManager[None]:
    """Within it variables are set now and once, also where a function is being traced."""
    return contextlib.nullcontext()


def is_keras_variable(value: Any) -> bool:
    """Whether `value` is a Keras variable."""
    return isinstance(value, keras.Variable)


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


def known(verdict: Any) -> bool | None:
    """A verdict that is known before the step runs; None for a tensor."""
    return verdict if isinstance(verdict, bool) else None

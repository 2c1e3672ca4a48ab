"""What the documented names lead to, handed to those who know the places of the names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lossscale.common.replacing import replace, submodule


class DocumentedNames(NamedTuple):
    """What `lossscale.install()` puts in place.

    Attributes:
        optimizer: The class of the pages for TensorFlow 2.4 and later.
        loss_scales: The classes of the loss scale objects.
        older: Takes a `mixed_precision` module of a Keras, and returns what the pages for
            TensorFlow 2.0 to 2.3 have in its `experimental`, by name.
        wrap: Takes the optimizer that `compile` was given and the global policy of its Keras, and
            returns the optimizer to train with.
    """

    optimizer: type[Any]
    loss_scales: Sequence[type[Any]]
    older: Callable[[Any], Mapping[str, Any]]
    wrap: Callable[[Any, Any], Any]


class Wrapping:
    """Stands in a trainer for the class that it wraps optimizers in, and that it looks for.

    Args:
        own: The trainer's own class. Its instances are the ones that are not wrapped.
        wrap: Takes the optimizer to wrap, and returns the wrapped one.
    """

    def __init__(self, own: type[Any], wrap: Callable[[Any], Any]) -> None:
        self._own = own
        self._wrap = wrap

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._own)

    def __call__(self, optimizer: Any, name: str | None = None) -> Any:
        return self._wrap(optimizer)


def put_into_mixed_precision(
    stack: contextlib.ExitStack, mixed_precision: Any, names: DocumentedNames, policies: Any
) -> None:
    """Sets the names in a `mixed_precision` module of a Keras.

    Args:
        stack: Puts back what was there before when it is closed.
        mixed_precision: The module.
        names: What the names lead to.
        policies: The `mixed_precision` module of the same Keras that has its policies.
    """
    replace(stack, mixed_precision, "LossScaleOptimizer", names.optimizer)
    experimental = submodule(stack, mixed_precision, "experimental")
    for name, value in names.older(policies).items():
        replace(stack, experimental, name, value)

"""What a training step notes for a monitor, and what the host reads of it.

Notes are part of a step only while an optimizer keeps some: the scale of the last step, and which
gradients were not finite on the last skipped step. They stay on the device, and nothing waits for
them until a monitor reads.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lossscale.monitoring.monitor import Skip
from lossscale.monitoring.record import NonfiniteTensor


class DecidedStep(NamedTuple):
    """A step once it is decided on, before anything is applied.

    Attributes:
        gradients: Those of the step; None where there is none.
        variables: Their variables.
        unscale: Returns a list of such gradients divided by the loss scale.
        finite: Whether the step is applied: a boolean scalar tensor, or True if nobody looked.
        scale: The loss scale of the step, float32 scalar tensor.
        number: The number of the step, counted from 1; integer scalar tensor. None where the
            notes count by themselves.
        is_shared: Whether all replicas have the same gradients; else each has its own.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    unscale: Callable[[Sequence[Any]], list[Any]]
    finite: Any
    scale: Any
    number: Any
    is_shared: bool


class Noted(NamedTuple):
    """What a monitor reads.

    Attributes:
        scale: The loss scale that the last step was taken with; 0 before the first one.
        skip: The last skipped step; None if it is none of those that were asked for.
    """

    scale: float
    skip: Skip | None


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Returns names, of which those that recur get a number.

    Examples:
        >>> unique(["kernel", "bias", "kernel"])
        ('kernel', 'bias', 'kernel#2')
    """
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for name in names:
        counts[name] += 1
        found.append(f"{name}#{counts[name]}" if counts[name] > 1 else name)
    return tuple(found)


def named_counts(names: Sequence[str], counts: Any) -> tuple[NonfiniteTensor, ...]:
    """Names integers of shape (variables, 2), leaving out what is zero."""
    return tuple(
        NonfiniteTensor(name, int(infs), int(nans))
        for name, (infs, nans) in zip(names, counts, strict=True)
        if infs or nans
    )


class Notes:
    """Notes of gradients that come with their variables, in any order."""

    names: tuple[str, ...]
    variables: Sequence[Any] = ()
    """The notes that a compiled step has to be passed and to return; empty where they are kept."""

    _rows: dict[int, int] | None = None

    def build(self, variables: Sequence[Any], names: Sequence[str]) -> None:
        """Makes room for the gradients of these variables; a second call does nothing."""
        if self._rows is not None:
            return
        # The keys of `_rows` must not be given to other objects.
        self._kept = list(variables)
        self._rows = {id(variable): row for row, variable in enumerate(variables)}
        self.names = unique(names)
        self._create()

    def _create(self) -> None:
        """Makes the tensors."""
        raise NotImplementedError

    def note(self, step: DecidedStep) -> None:
        """Notes a step."""
        raise NotImplementedError

    def note_step(self, **step: Any) -> None:
        """Notes a step, given the attributes of a `DecidedStep`."""
        self.note(DecidedStep(**step))

    def count_from(self, step: int) -> None:
        """Takes the number of steps so far, where the notes count by themselves."""

    def read(self, after: int, until: int) -> Noted:
        """Waits for the device and returns what was noted of the steps with these numbers.

        Args:
            after: The number of the step before the first one that is asked for.
            until: The number of the last one.
        """
        raise NotImplementedError

    def _unscaled_by_row(self, step: DecidedStep) -> list[Any]:
        """Returns the unscaled gradient, or None, of each variable."""
        found: list[Any] = [None] * len(self.names)
        unscaled = step.unscale(step.gradients)
        for gradient, variable in zip(unscaled, step.variables, strict=True):
            row = (self._rows or {}).get(id(variable))
            if row is not None:
                found[row] = gradient
        return found

"""The data that a training step tracks for a monitor, and how the host reads it.

A step tracks its loss scale, and the number of infinities and NaN in each gradient on the last
skipped step. It does so only after a monitor was attached to the optimizer. The data stay on the
device, and nothing waits for them until the monitor reads.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from lossscale.framework_types import Array, Gradient, Scalar, Variable
from lossscale.monitoring.record import NonfiniteTensor
from lossscale.monitoring.recorder import SkippedStep


class CheckedStep(NamedTuple):
    """A step whose gradients were checked, before they are applied.

    Attributes:
        gradients: The gradients; None for a variable without one.
        variables: Their variables.
        unscale: Divides a list of gradients by the loss scale.
        finite: Whether the step is applied: a boolean scalar tensor, or True without a check.
        scale: The loss scale of the step, float32 scalar tensor.
        number: The number of the step, counted from 1; integer scalar tensor. None if the tracker
            counts the steps.
        is_shared: Whether all replicas have the same gradients; otherwise each has its own.
    """

    gradients: Sequence[Gradient]
    variables: Sequence[Variable]
    unscale: Callable[[Sequence[Gradient]], list[Gradient]]
    finite: Scalar
    scale: Scalar
    number: Scalar
    is_shared: bool


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns names, with a number appended to repeated ones.

    Examples:
        >>> unique_names(["kernel", "bias", "kernel"])
        ('kernel', 'bias', 'kernel#2')
    """
    counts: collections.Counter[str] = collections.Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(f"{name}#{counts[name]}" if counts[name] > 1 else name)
    return tuple(unique)


def nonfinite_tensors(names: Sequence[str], counts: Array) -> tuple[NonfiniteTensor, ...]:
    """Returns the tensors with a count that is not 0.

    Args:
        names: The names of the variables.
        counts: Integers of shape (variables, 2): infinities and NaN.
    """
    return tuple(
        NonfiniteTensor(name, int(infs), int(nans))
        for name, (infs, nans) in zip(names, counts, strict=True)
        if infs or nans
    )


class OverflowTracker:
    """Tracks gradients that come with their variables, in any order."""

    names: tuple[str, ...]
    variables: Sequence[Variable] = ()
    """Variables that a compiled step must take and return; empty if there are none."""

    # Whether it counts the steps itself.
    counts_steps: ClassVar[bool] = False
    _rows: dict[int, int] | None = None

    # Defined by each framework. Makes the tensors; records a step.
    _create: Callable[[], None]
    _track: Callable[[CheckedStep], None]
    # Waits for the device. Takes the number of the step before the first one that is asked for, and
    # the number of the last one. Returns the loss scale of the last step, 0 before the first; and
    # the last skipped step, None if it is not one of the steps that are asked for.
    read: Callable[[int, int], tuple[float, SkippedStep | None]]

    def build(self, variables: Sequence[Variable], names: Sequence[str]) -> None:
        """Creates the counts for the gradients of these variables; a second call does nothing."""
        if self._rows is not None:
            return
        # Keeps the variables alive, so that their ids, the keys of `_rows`, are not reused.
        self._kept = list(variables)
        self._rows = {id(variable): row for row, variable in enumerate(variables)}
        self.names = unique_names(names)
        self._create()

    def track(self, **step: Any) -> None:
        """Records a step, given the attributes of a `CheckedStep`."""
        self._track(CheckedStep(**step))

    def count_from(self, step: int) -> None:
        """Sets the number of steps so far, if the tracker counts them."""

    def _unscaled_by_row(self, step: CheckedStep) -> list[Gradient]:
        """Returns the unscaled gradient, or None, of each variable."""
        by_row: list[Gradient] = [None] * len(self.names)
        unscaled = step.unscale(step.gradients)
        for gradient, variable in zip(unscaled, step.variables, strict=True):
            row = (self._rows or {}).get(id(variable))
            if row is not None:
                by_row[row] = gradient
        return by_row

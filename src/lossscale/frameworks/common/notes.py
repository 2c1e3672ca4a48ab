"""What the watches of all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lossscale.diagnostics.exponents import FLOAT32, FLOAT64, ExponentTable, Layout
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.measurement import paths_of
from lossscale.diagnostics.records import NonfiniteTensor

LAYOUTS = (FLOAT32, FLOAT64)
_WIDE = ("float64", "complex128")


class Seen(NamedTuple):
    """A step as the optimizer sees it once it is decided on, before anything is applied.

    Attributes:
        gradients: Those of the step; None where there is none.
        variables: Their variables.
        unscale: Returns a list of such gradients divided by the loss scale.
        finite: Whether the step is applied: a boolean scalar tensor, or True if nobody looked.
        scale: The loss scale of the step, float32 scalar tensor.
        step: The number of the step, counted from 1; integer scalar tensor.
        is_shared: Whether all replicas have the same gradients; else each has its own.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    unscale: Callable[[Sequence[Any]], list[Any]]
    finite: Any
    scale: Any
    step: Any
    is_shared: bool


class LastSkip(NamedTuple):
    """What was noted of the last skipped step.

    Attributes:
        step: Its number; 0 if no step was skipped.
        scale: The loss scale it was taken with.
    """

    step: int
    scale: float


class WatchBase:
    """The variables that are watched, by name, and the rows that they have in tables.

    Args:
        histograms_every: At which multiples of this step number exponents are counted; None for
            never.
    """

    def __init__(self, histograms_every: int | None) -> None:
        self.histograms_every = histograms_every
        self.built = False
        self.names: list[str] = []
        self._rows: dict[int, int] = {}
        # Per layout of tables, the rows of the variables that have one.
        self._members: dict[Layout, list[int]] = {}
        # The keys of `_rows` must not be given to other objects.
        self._kept: list[Any] = []

    def build(self, variables: Sequence[Any], names: Sequence[str], dtypes: Sequence[str]) -> None:
        """Makes room for the gradients of these variables; a second call does nothing.

        Args:
            variables: All that the optimizer trains.
            names: What to call them.
            dtypes: The names of their dtypes.
        """
        if self.built:
            return
        self._kept = list(variables)
        self.names = [name for name, _ in paths_of(names)]
        self._rows = {id(variable): row for row, variable in enumerate(variables)}
        if self.histograms_every is not None:
            for layout in LAYOUTS:
                wide = layout is FLOAT64
                rows = [row for row, dtype in enumerate(dtypes) if (dtype in _WIDE) == wide]
                if rows:
                    self._members[layout] = rows
        self._create()
        self.built = True

    def _create(self) -> None:
        """Makes the tensors."""
        raise NotImplementedError

    def follow(self, step: int) -> None:
        """Takes the number of steps so far, where the watch counts by itself."""

    def serves(self, histograms_every: int | None) -> bool:
        """Whether it notes what a monitor needs that samples histograms so often."""
        return histograms_every is None or self.histograms_every == histograms_every

    def _by_row(self, seen: Seen, gradients: Sequence[Any]) -> list[Any]:
        """Returns a gradient, or None, for each of the watched variables."""
        found: list[Any] = [None] * len(self.names)
        for gradient, variable in zip(gradients, seen.variables, strict=True):
            row = self._rows.get(id(variable))
            if row is not None:
                found[row] = gradient
        return found

    def _named_counts(self, counts: Any) -> list[NonfiniteTensor]:
        """Names integers of shape (variables, 2), leaving out what is zero."""
        return [
            NonfiniteTensor(name, int(infs), int(nans))
            for name, (infs, nans) in zip(self.names, counts, strict=True)
            if infs or nans
        ]

    def _named_histograms(
        self, tables: dict[Layout, ExponentTable], on_host: Callable[[ExponentTable], ExponentTable]
    ) -> dict[str, GradientHistogram]:
        """Names the rows of stacked tables, leaving out variables without a gradient."""
        found = {}
        for layout, rows in self._members.items():
            for row, counts, largest in zip(rows, *tables[layout], strict=True):
                if counts.any():
                    table = on_host(ExponentTable(counts, largest))
                    found[self.names[row]] = GradientHistogram.from_table(table)
        return found

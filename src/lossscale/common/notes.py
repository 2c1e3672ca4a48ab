"""What a training step notes for a monitor, and what the host reads of it.

Notes are part of a step only while an optimizer keeps some: the scale of the last step, which
gradients were not finite on the last skipped step, and the exponents of the gradients of the last
sampled step. They stay on the device, and nothing waits for them until a monitor reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lossscale.diagnostics.exponents import FLOAT32, FLOAT64, ExponentTable, Layout
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.measurement import paths_of
from lossscale.diagnostics.records import NonfiniteTensor

_WIDE = ("float64", "complex128")


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


class Skip(NamedTuple):
    """What was noted of a skipped step.

    Attributes:
        step: Its number.
        scale: The loss scale it was taken with.
        nonfinite: The gradients with an infinity or a NaN.
    """

    step: int
    scale: float
    nonfinite: tuple[NonfiniteTensor, ...]


class Noted(NamedTuple):
    """What a monitor reads.

    Attributes:
        scale: The loss scale that the last step was taken with; 0 before the first one.
        skip: The last skipped step; None if it is none of those that were asked for.
        histograms: The unscaled gradients of the last sampled step, by variable; None if it is none
            of those that were asked for.
    """

    scale: float
    skip: Skip | None
    histograms: dict[str, GradientHistogram] | None


class Plan(NamedTuple):
    """Which gradients are noted, and when their exponents are counted.

    Attributes:
        names: The names of the variables; their places are rows.
        histograms_every: At which multiples of the step's number exponents are counted; None for
            never.
        tables: The rows that have a table, by its layout.
    """

    names: tuple[str, ...]
    histograms_every: int | None
    tables: dict[Layout, tuple[int, ...]]

    @classmethod
    def of(cls, names: Sequence[str], dtypes: Sequence[str], histograms_every: int | None) -> Plan:
        """Returns the plan for variables; names that recur get numbers.

        Args:
            names: Their names.
            dtypes: The names of their dtypes.
            histograms_every: As above.
        """
        tables: dict[Layout, tuple[int, ...]] = {}
        if histograms_every is not None:
            for layout in (FLOAT32, FLOAT64):
                wide = layout is FLOAT64
                rows = tuple(row for row, d in enumerate(dtypes) if (d in _WIDE) == wide)
                if rows:
                    tables[layout] = rows
        return cls(tuple(name for name, _ in paths_of(names)), histograms_every, tables)

    def nonfinite(self, counts: Any) -> tuple[NonfiniteTensor, ...]:
        """Names integers of shape (variables, 2), leaving out what is zero."""
        return tuple(
            NonfiniteTensor(name, int(infs), int(nans))
            for name, (infs, nans) in zip(self.names, counts, strict=True)
            if infs or nans
        )

    def histograms(
        self,
        stacked: Mapping[Layout, ExponentTable],
        on_host: Callable[[ExponentTable], ExponentTable],
    ) -> dict[str, GradientHistogram]:
        """Names the rows of stacked tables, leaving out variables without a gradient."""
        found = {}
        for layout, rows in self.tables.items():
            for row, counts, largest in zip(rows, *stacked[layout], strict=True):
                if counts.any():
                    table = on_host(ExponentTable(counts, largest))
                    found[self.names[row]] = GradientHistogram.from_table(table)
        return found


class StepNotes(Protocol):
    """The notes of one optimizer: what a wrapper asks of those of its framework."""

    histograms_every: int | None
    variables: Sequence[Any]
    """The notes that a compiled step has to be passed and to return; empty where they are kept."""

    def build(self, variables: Sequence[Any], names: Sequence[str], dtypes: Sequence[str]) -> None:
        """Makes room for the gradients of these variables; a second call does nothing."""

    def note(self, step: DecidedStep) -> None:
        """Notes a step."""

    def count_from(self, step: int) -> None:
        """Takes the number of steps so far, where the notes count by themselves."""

    def read(self, after: int, until: int) -> Noted:
        """Waits for the device and returns what was noted of the steps with these numbers."""


class NotesOfVariables(StepNotes):
    """Notes of gradients that come with their variables, in any order.

    Args:
        histograms_every: At which multiples of the step's number exponents are counted; None for
            never.
    """

    plan: Plan

    def __init__(self, histograms_every: int | None) -> None:
        self.histograms_every = histograms_every
        self.variables: Sequence[Any] = ()
        self._rows: dict[int, int] = {}
        # The keys of `_rows` must not be given to other objects.
        self._kept: list[Any] | None = None

    def build(self, variables: Sequence[Any], names: Sequence[str], dtypes: Sequence[str]) -> None:
        if self._kept is not None:
            return
        self._kept = list(variables)
        self._rows = {id(variable): row for row, variable in enumerate(variables)}
        self.plan = Plan.of(names, dtypes, self.histograms_every)
        self._create()

    def _create(self) -> None:
        """Makes the tensors."""
        raise NotImplementedError

    def note_step(self, **step: Any) -> None:
        """Notes a step, given the attributes of a `DecidedStep`."""
        self.note(DecidedStep(**step))

    def count_from(self, step: int) -> None:
        """Nothing to do where the optimizer's own counter is read."""

    def serves(self, histograms_every: int | None) -> bool:
        """Whether it notes what a monitor needs that samples histograms so often."""
        return histograms_every is None or self.histograms_every == histograms_every

    def _unscaled_by_row(self, step: DecidedStep) -> list[Any]:
        """Returns the unscaled gradient, or None, of each variable."""
        found: list[Any] = [None] * len(self.plan.names)
        unscaled = step.unscale(step.gradients)
        for gradient, variable in zip(unscaled, step.variables, strict=True):
            row = self._rows.get(id(variable))
            if row is not None:
                found[row] = gradient
        return found

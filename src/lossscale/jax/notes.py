"""JAX: notes as a pure state, which a compiled step takes and returns.

`init` makes the first state and `update` the next one, inside a compiled function as outside;
`read` brings it to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.common.notes import DecidedStep, Noted, NotesOfVariables, Plan, Skip
from lossscale.diagnostics.exponents import ExponentTable, Layout
from lossscale.jax.exponents import count_bins, on_host
from lossscale.jax.scaling import real_parts


class NoteState(NamedTuple):
    """What the steps so far have noted: arrays, each a buffer of its own.

    Attributes:
        last_scale: float32 scalar; the loss scale that the last step was taken with.
        skip_step: int32 scalar; the number of the last skipped step.
        skip_scale: float32 scalar; the loss scale it was taken with.
        nonfinite: uint32 of shape (variables, 2); its infinities and NaN.
        table_step: int32 scalar; the number of the last step whose exponents were counted.
        tables: For each layout the tables of its rows, stacked.
    """

    last_scale: Any
    skip_step: Any
    skip_scale: Any
    nonfinite: Any
    table_step: Any
    tables: tuple[ExponentTable, ...]


def init(plan: Plan) -> NoteState:
    """Returns the notes before the first step: NumPy arrays of zeros."""
    tables = []
    for layout, rows in plan.tables.items():
        empty = _empty_table(layout)
        tables.append(ExponentTable(*(np.zeros((len(rows), *p.shape), p.dtype) for p in empty)))
    return NoteState(
        last_scale=np.zeros((), np.float32),
        skip_step=np.zeros((), np.int32),
        skip_scale=np.zeros((), np.float32),
        nonfinite=np.zeros((len(plan.names), 2), np.uint32),
        table_step=np.zeros((), np.int32),
        tables=tuple(tables),
    )


def update(
    plan: Plan,
    state: NoteState,
    gradients: Callable[[], Sequence[Any]],
    *,
    finite: Any,
    scale: Any,
    number: Any,
) -> NoteState:
    """Returns the notes after a step.

    Args:
        plan: What is noted.
        state: The notes before the step.
        gradients: Returns the unscaled gradient of each row, None where there is none; called
            only in the branches that need them.
        finite: Whether the step is applied: a boolean scalar array, or True if nobody looked.
        scale: The loss scale of the step, float32 scalar array.
        number: The number of the step, counted from 1; integer scalar array.
    """
    state = state._replace(last_scale=jnp.asarray(scale, jnp.float32))
    if finite is not True:
        state = _replaced_if(
            jnp.logical_not(finite),
            state,
            ("skip_step", "skip_scale", "nonfinite"),
            lambda: (number, scale, jnp.stack([_nonfinite(g) for g in gradients()])),
        )
    if plan.tables:
        state = _replaced_if(
            jnp.asarray(number) % plan.histograms_every == 0,
            state,
            ("table_step", "tables"),
            lambda: (number, _tables(plan, gradients())),
        )
    return state


def read(plan: Plan, state: NoteState, after: int, until: int) -> Noted:
    """Waits for the device and returns what was noted of the steps with these numbers.

    Args:
        plan: What is noted.
        state: The notes.
        after: The number of the step before the first one that is asked for.
        until: The number of the last one.
    """
    skip = histograms = None
    if after < (step := int(state.skip_step)) <= until:
        named = plan.nonfinite(np.asarray(state.nonfinite))
        skip = Skip(step, float(state.skip_scale), named)
    if after < int(state.table_step) <= until:
        on_its_way = [ExponentTable(*map(np.asarray, table)) for table in state.tables]
        histograms = plan.histograms(dict(zip(plan.tables, on_its_way, strict=True)), on_host)
    return Noted(float(state.last_scale), skip, histograms)


class Notes(NotesOfVariables):
    """Notes in variables, for a trainer that passes them in and out with the optimizer's.

    Args:
        histograms_every: At which multiples of the step's number exponents are counted.
        new_variable: Makes a variable of a name, a dtype and a shape, with zeros in it.
    """

    def __init__(
        self,
        histograms_every: int | None,
        new_variable: Callable[[str, str, tuple[int, ...]], Any],
    ) -> None:
        super().__init__(histograms_every)
        self._new_variable = new_variable

    def _create(self) -> None:
        leaves, self._structure = jax.tree.flatten(init(self.plan))
        names = [jax.tree_util.keystr(path) for path, _ in _with_paths(init(self.plan))]
        self.variables = [
            self._new_variable(name.strip(".").replace(".", "_"), leaf.dtype.name, leaf.shape)
            for name, leaf in zip(names, leaves, strict=True)
        ]

    def note(self, step: DecidedStep) -> None:
        before = self._state()
        after = update(
            self.plan,
            before,
            lambda: self._unscaled_by_row(step),
            finite=step.finite,
            scale=step.scale,
            number=step.number,
        )
        leaves = zip(self.variables, jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        for variable, old, new in leaves:
            if new is not old:
                variable.assign(new)

    def read(self, after: int, until: int) -> Noted:
        return read(self.plan, self._state(), after, until)

    def _state(self) -> NoteState:
        values = [variable.value for variable in self.variables]
        state: NoteState = jax.tree.unflatten(self._structure, values)
        return state


def _with_paths(state: NoteState) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(state)[0]
    return found


def _replaced_if(
    condition: Any, state: NoteState, fields: Sequence[str], values: Callable[[], Sequence[Any]]
) -> NoteState:
    """Replaces fields by what `values` computes if a boolean scalar array is true."""
    # Only these fields enter the branch: what passes through one may be copied.
    old = [getattr(state, field) for field in fields]

    def new() -> list[Any]:
        return [
            jax.tree.map(lambda o, v: jnp.asarray(v, o.dtype), *pair)
            for pair in zip(old, values(), strict=True)
        ]

    if isinstance(condition, jax.core.Tracer):
        chosen = jax.lax.cond(condition, new, lambda: jax.tree.map(jnp.asarray, old))
    else:
        chosen = new() if bool(condition) else old
    return state._replace(**dict(zip(fields, chosen, strict=True)))


def _tables(plan: Plan, gradients: Sequence[Any]) -> tuple[ExponentTable, ...]:
    stacked = []
    for layout, rows in plan.tables.items():
        tables = [
            count_bins(gradients[row]) if real_parts(gradients[row]) else _empty_table(layout)
            for row in rows
        ]
        columns = zip(*tables, strict=True)
        stacked.append(ExponentTable(*(jnp.stack(column) for column in columns)))
    return tuple(stacked)


def _empty_table(layout: Layout) -> ExponentTable:
    dtype = jnp.float32 if layout.fraction_bits == 23 else jnp.float64
    table = jax.eval_shape(count_bins, jax.ShapeDtypeStruct((1,), dtype))
    return ExponentTable(*(np.zeros(part.shape, part.dtype) for part in table))


def _nonfinite(gradient: Any) -> Any:
    """How many elements are infinite and how many are NaN, uint32 of shape (2,)."""
    counts = jnp.zeros(2, jnp.uint32)
    for part in real_parts(gradient):
        tests = (jnp.isinf, jnp.isnan)
        counts += jnp.stack([jnp.sum(test(part), dtype=jnp.uint32) for test in tests])
    return counts

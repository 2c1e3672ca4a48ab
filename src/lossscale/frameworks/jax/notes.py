"""JAX: the notes are variables that the trainer passes in and out with those of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from lossscale.diagnostics.exponents import ExponentTable, Layout
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.records import NonfiniteTensor
from lossscale.frameworks.common.notes import LastSkip, Seen, WatchBase
from lossscale.frameworks.jax.exponents import count_bins, on_host


class Watch(WatchBase):
    """What a step notes.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a variable of a name, a dtype and a shape, with zeros in it.
    """

    def __init__(
        self,
        histograms_every: int | None,
        new_variable: Callable[[str, str, tuple[int, ...]], Any],
    ) -> None:
        super().__init__(histograms_every)
        self._new_variable = new_variable
        self.variables: list[Any] = []
        """All of them: state that a compiled step takes and returns."""

    def _create(self) -> None:
        make = self._new_variable
        self._scale = make("scale", "float32", ())
        self._skip = [
            make("skip_step", "int32", ()),
            make("skip_scale", "float32", ()),
            make("counts", "uint32", (len(self.names), 2)),
        ]
        self._table_state = [make("table_step", "int32", ())] if self._members else []
        self._empty = {layout: _empty_table(layout) for layout in self._members}
        for layout, rows in self._members.items():
            counts, largest = self._empty[layout]
            self._table_state += [
                make("exponents", counts.dtype.name, (len(rows), *counts.shape)),
                make("largest", largest.dtype.name, (len(rows),)),
            ]
        self.variables = [self._scale, *self._skip, *self._table_state]

    def note(self, seen: Seen) -> None:
        """Notes a step, inside a compiled function as outside."""
        self._scale.assign(jnp.asarray(seen.scale, jnp.float32))
        if seen.finite is not True:
            skipped = jnp.logical_not(seen.finite)
            _assign_if(skipped, self._skip, lambda: self._skip_values(seen))
        if self._table_state:
            is_sampled = jnp.asarray(seen.step) % self.histograms_every == 0
            _assign_if(is_sampled, self._table_state, lambda: self._table_values(seen))

    def _skip_values(self, seen: Seen) -> list[Any]:
        gradients = self._by_row(seen, seen.unscale(seen.gradients))
        return [seen.step, seen.scale, jnp.stack([_nonfinite(g) for g in gradients])]

    def _table_values(self, seen: Seen) -> list[Any]:
        gradients = self._by_row(seen, seen.unscale(seen.gradients))
        values = [seen.step]
        for layout, rows in self._members.items():
            tables = [
                count_bins(gradients[row]) if _is_counted(gradients[row]) else self._empty[layout]
                for row in rows
            ]
            values += [jnp.stack(column) for column in zip(*tables, strict=True)]
        return values

    def scale(self) -> float:
        """The loss scale that the last step was taken with; 0 before the first one."""
        return float(self._scale.value)

    def last_skip(self) -> LastSkip:
        """The last step that was skipped."""
        step, scale, _ = self._skip
        return LastSkip(int(step.value), float(scale.value))

    def nonfinite(self) -> list[NonfiniteTensor]:
        """The gradients of that step with an infinity or a NaN."""
        return self._named_counts(np.asarray(self._skip[-1].value))

    def histogram_step(self) -> int:
        """The step whose gradients `histograms` describes; 0 before the first one."""
        return int(self._table_state[0].value)

    def histograms(self) -> dict[str, GradientHistogram]:
        """The unscaled gradients of the last sampled step, by variable."""
        arrays = iter(np.asarray(variable.value) for variable in self._table_state[1:])
        tables = {layout: ExponentTable(next(arrays), next(arrays)) for layout in self._members}
        return self._named_histograms(tables, on_host)


def _assign_if(condition: Any, variables: list[Any], values: Callable[[], list[Any]]) -> None:
    """Assigns what `values` computes if a boolean scalar array is true; else computes nothing."""
    old = [variable.value for variable in variables]

    def new() -> list[Any]:
        return [jnp.asarray(v, o.dtype) for v, o in zip(values(), old, strict=True)]

    if isinstance(condition, jax.core.Tracer):
        found = jax.lax.cond(condition, new, lambda: old)
    elif bool(condition):
        found = new()
    else:
        return
    for variable, value in zip(variables, found, strict=True):
        variable.assign(value)


def _is_counted(gradient: Any) -> bool:
    return gradient is not None and jnp.issubdtype(gradient.dtype, jnp.inexact)


def _empty_table(layout: Layout) -> ExponentTable:
    dtype = jnp.float32 if layout.fraction_bits == 23 else jnp.float64
    table = jax.eval_shape(count_bins, jax.ShapeDtypeStruct((1,), dtype))
    return ExponentTable(*(np.zeros(part.shape, part.dtype) for part in table))


def _nonfinite(gradient: Any) -> Any:
    """How many elements are infinite and how many are NaN, uint32 of shape (2,)."""
    if not _is_counted(gradient):
        return jnp.zeros(2, jnp.uint32)
    values = gradient.data if isinstance(gradient, BCOO) else gradient
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        values = jnp.stack([values.real, values.imag])
    return jnp.stack([jnp.sum(test(values), dtype=jnp.uint32) for test in (jnp.isinf, jnp.isnan)])

"""TensorFlow: notes in variables; eager, in a `tf.function`, under XLA, and on replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.common.notes import DecidedStep, Noted, NotesOfVariables, Skip
from lossscale.diagnostics.exponents import ExponentTable, Layout
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.tensorflow.exponents import count_bins, on_host
from lossscale.tensorflow.scaling import real_parts


class Notes(NotesOfVariables):
    """What a step notes, in variables of which every replica has its own copy.

    So a replica writes inside a branch without meeting the others, and the host puts the copies
    together. It reads those of its own process: each worker sees what its replicas have noted.
    """

    _is_shared = True

    def _create(self) -> None:
        self._scale = _variable("scale", tf.float32, ())
        self._skip_step = _variable("skip_step", tf.int64, ())
        self._skip_scale = _variable("skip_scale", tf.float32, ())
        self._nonfinite = _variable("nonfinite", tf.int64, (len(self.plan.names), 2))
        self._table_step = _variable("table_step", tf.int64, ())
        self._tables = {
            layout: ExponentTable(
                _variable("exponents", tf.float64, (len(rows), layout.rows, 2)),
                _variable("largest", tf.int64, (len(rows),)),
            )
            for layout, rows in self.plan.tables.items()
        }

    def note(self, step: DecidedStep) -> None:
        """Notes a step, in a replica context."""
        self._is_shared = step.is_shared
        self._scale.assign(tf.cast(step.scale, tf.float32))
        if step.finite is not True:
            tf.cond(step.finite, _nothing, lambda: self._note_skip(step))
        if self.histograms_every is not None:
            is_sampled = tf.equal(step.number % self.histograms_every, 0)
            tf.cond(is_sampled, lambda: self._note_tables(step), _nothing)

    def _note_skip(self, step: DecidedStep) -> Any:
        gradients = self._unscaled_by_row(step)
        self._nonfinite.assign(tf.stack([_nonfinite(gradient) for gradient in gradients]))
        self._skip_step.assign(tf.cast(step.number, tf.int64))
        self._skip_scale.assign(tf.cast(step.scale, tf.float32))
        return _nothing()

    def _note_tables(self, step: DecidedStep) -> Any:
        gradients = self._unscaled_by_row(step)
        for layout, rows in self.plan.tables.items():
            tables = [_table(gradients[row], layout) for row in rows]
            self._tables[layout].counts.assign(tf.stack([table.counts for table in tables]))
            self._tables[layout].largest.assign(tf.stack([table.largest for table in tables]))
        self._table_step.assign(tf.cast(step.number, tf.int64))
        return _nothing()

    def read(self, after: int, until: int) -> Noted:
        skip = histograms = None
        if after < (step := int(_copies(self._skip_step)[0])) <= until:
            together = np.max if self._is_shared else np.sum
            named = self.plan.nonfinite(together(_copies(self._nonfinite), axis=0))
            skip = Skip(step, float(_copies(self._skip_scale)[0]), named)
        if after < int(_copies(self._table_step)[0]) <= until:
            histograms = self._histograms()
        return Noted(float(_copies(self._scale)[0]), skip, histograms)

    def _histograms(self) -> dict[str, GradientHistogram]:
        copies = [
            self.plan.histograms(dict(zip(self._tables, tables, strict=True)), on_host)
            for tables in zip(*map(_table_copies, self._tables.values()), strict=True)
        ]
        if self._is_shared:
            return copies[0]
        names = dict.fromkeys(name for copy in copies for name in copy)
        return {
            name: GradientHistogram.merge(copy[name] for copy in copies if name in copy)
            for name in names
        }


def _variable(name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=f"noted_{name}",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _copies(variable: Any) -> Any:
    """The values of the copies of a variable that this process has, in one NumPy array."""
    return np.stack([copy.numpy() for copy in getattr(variable, "values", (variable,))])


def _table_copies(table: ExponentTable) -> list[ExponentTable]:
    return [
        ExponentTable(counts, largest)
        for counts, largest in zip(_copies(table.counts), _copies(table.largest), strict=True)
    ]


def _nothing() -> Any:
    return tf.constant(False)


def _nonfinite(gradient: Any) -> Any:
    """How many elements are infinite and how many are NaN, int64 of shape (2,)."""
    tests: tuple[Callable[[Any], Any], ...] = (tf.math.is_inf, tf.math.is_nan)
    counts = tf.zeros(2, tf.int64)
    for part in real_parts(gradient):
        counts += tf.stack([tf.math.count_nonzero(test(part), dtype=tf.int64) for test in tests])
    return counts


def _table(gradient: Any, layout: Layout) -> ExponentTable:
    if not real_parts(gradient):
        return ExponentTable(tf.zeros((layout.rows, 2), tf.float64), tf.zeros((), tf.int64))
    return count_bins(gradient)

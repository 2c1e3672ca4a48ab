"""TensorFlow: eager, in a `tf.function`, under XLA, and on replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.diagnostics.exponents import ExponentTable, Layout
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.records import NonfiniteTensor
from lossscale.frameworks.common.notes import LastSkip, Seen, WatchBase
from lossscale.frameworks.tensorflow.exponents import count_bins, on_host


class Watch(WatchBase):
    """What a step notes, in variables of which every replica has its own copy.

    So a replica writes inside a branch without meeting the others, and the host puts the copies
    together. It reads those of its own process: each worker sees what its replicas have noted.
    """

    _is_shared = True

    def _create(self) -> None:
        count = len(self.names)
        self._scale = _variable("scale", tf.float32, ())
        self._skip_step = _variable("skip_step", tf.int64, ())
        self._skip_scale = _variable("skip_scale", tf.float32, ())
        self._counts = _variable("counts", tf.int64, (count, 2))
        self._table_step = _variable("table_step", tf.int64, ())
        self._tables = {
            layout: ExponentTable(
                _variable("exponents", tf.float64, (len(rows), layout.rows, 3)),
                _variable("largest", tf.int64, (len(rows),)),
            )
            for layout, rows in self._members.items()
        }

    def note(self, seen: Seen) -> None:
        """Notes a step, in a replica context."""
        self._is_shared = seen.is_shared
        self._scale.assign(tf.cast(seen.scale, tf.float32))
        if seen.finite is not True:
            tf.cond(seen.finite, _nothing, lambda: self._note_skip(seen))
        if self.histograms_every is not None:
            is_sampled = tf.equal(seen.step % self.histograms_every, 0)
            tf.cond(is_sampled, lambda: self._note_tables(seen), _nothing)

    def _note_skip(self, seen: Seen) -> Any:
        gradients = self._by_row(seen, seen.unscale(seen.gradients))
        self._counts.assign(tf.stack([_nonfinite(gradient) for gradient in gradients]))
        self._skip_step.assign(tf.cast(seen.step, tf.int64))
        self._skip_scale.assign(tf.cast(seen.scale, tf.float32))
        return _nothing()

    def _note_tables(self, seen: Seen) -> Any:
        gradients = self._by_row(seen, seen.unscale(seen.gradients))
        for layout, rows in self._members.items():
            tables = [_table(gradients[row], layout) for row in rows]
            self._tables[layout].counts.assign(tf.stack([table.counts for table in tables]))
            self._tables[layout].largest.assign(tf.stack([table.largest for table in tables]))
        self._table_step.assign(tf.cast(seen.step, tf.int64))
        return _nothing()

    def scale(self) -> float:
        """The loss scale that the last step was taken with; 0 before the first one."""
        return float(_copies(self._scale)[0])

    def last_skip(self) -> LastSkip:
        """The last step that was skipped."""
        return LastSkip(int(_copies(self._skip_step)[0]), float(_copies(self._skip_scale)[0]))

    def nonfinite(self) -> list[NonfiniteTensor]:
        """The gradients of that step with an infinity or a NaN."""
        together = np.max if self._is_shared else np.sum
        return self._named_counts(together(_copies(self._counts), axis=0))

    def histogram_step(self) -> int:
        """The step whose gradients `histograms` describes; 0 before the first one."""
        return int(_copies(self._table_step)[0])

    def histograms(self) -> dict[str, GradientHistogram]:
        """The unscaled gradients of the last sampled step, by variable."""
        copies = [
            self._named_histograms(dict(zip(self._tables, tables, strict=True)), on_host)
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
        name=f"watch_{name}",
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
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    if gradient is None or not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return tf.zeros(2, tf.int64)
    if gradient.dtype.is_complex:
        gradient = tf.stack([tf.math.real(gradient), tf.math.imag(gradient)])
    tests: tuple[Callable[[Any], Any], ...] = (tf.math.is_inf, tf.math.is_nan)
    return tf.stack([tf.math.count_nonzero(test(gradient), dtype=tf.int64) for test in tests])


def _table(gradient: Any, layout: Layout) -> ExponentTable:
    if gradient is None or not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return ExponentTable(tf.zeros((layout.rows, 3), tf.float64), tf.zeros((), tf.int64))
    return count_bins(gradient)

"""The workloads of optimizers: variables and gradients, as NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np


class Rows(NamedTuple):
    """A sparse gradient: some rows of a matrix, the others are zero."""

    values: Any
    rows: Any
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Variables, and the gradients that every step applies.

    Args:
        shapes: The shape of each variable; all are float32.
        rows_touched: If not 0, the gradient of each variable is sparse, with this many rows.
    """

    shapes: tuple[tuple[int, ...], ...]
    rows_touched: int = 0

    @property
    def parameters(self) -> int:
        """The number of elements of all variables."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def values(self) -> list[Any]:
        """Returns the initial values of the variables."""
        random = np.random.default_rng(0)
        return [0.1 * random.standard_normal(shape, np.float32) for shape in self.shapes]

    def gradients(self, scale: float = 1.0, overflow: bool = False) -> list[Any]:
        """Returns an array or `Rows` for each variable, times a scale; one element may overflow."""
        random, factor = np.random.default_rng(1), np.float32(scale)
        made: list[Any] = []
        for shape in self.shapes:
            if self.rows_touched:
                rows = np.sort(random.choice(shape[0], self.rows_touched, replace=False))
                values = random.standard_normal((self.rows_touched, *shape[1:]), np.float32)
                made.append(Rows(0.01 * values * factor, rows, shape))
            else:
                made.append(0.01 * random.standard_normal(shape, np.float32) * factor)
        if overflow:
            last = made[-1].values if self.rows_touched else made[-1]
            last.flat[last.size // 2] = np.inf
        return made


def equal(variables: int, parameters: int, **settings: Any) -> Workload:
    """Returns a workload with this number of variables of equal size."""
    if parameters % variables:
        raise ValueError(f"{parameters} parameters do not divide into {variables} variables")
    return Workload(((parameters // variables,),) * variables, **settings)

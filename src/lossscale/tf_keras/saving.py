"""The optimizer in tf_keras' own files: the loss scale by name; the inner optimizer is a child."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tf_keras

import lossscale.framework_types as ft
from lossscale.keras_common import saving
from lossscale.keras_common.optimizer import KerasCommonOptimizer


def save_own_variables(optimizer: KerasCommonOptimizer, store: ft.Store) -> None:
    """Writes the loss scale, the counters, and what the inner optimizer does not list."""
    named = _named(optimizer)
    values = dict(zip(named, values_of(named.values()), strict=True))
    saving.save(optimizer, store, values, _of_inner(optimizer))


def load_own_variables(optimizer: KerasCommonOptimizer, store: ft.Store) -> None:
    """Reads these. A file of tf_keras' own class has no loss scale."""
    values, numbered = saving.values_in(store)
    # Its own class writes the inner optimizer's variables twice.
    _, again = saving.values_in(getattr(store, "parent", {}).get("inner_optimizer/vars", {}))
    if again and len(again) == len(numbered) and all(map(np.array_equal, again, numbered)):
        values[saving.SHAPES] = saving.shapes_of(numbered)
    saving.load(optimizer, values, _named(optimizer), _of_inner(optimizer))


def _named(optimizer: KerasCommonOptimizer) -> dict[str, ft.Variable]:
    # tf_keras writes what the inner optimizer lists, and loses Nadam's product.
    return {**optimizer._own_variables(), **optimizer._unlisted_variables()}


def _of_inner(optimizer: KerasCommonOptimizer) -> list[ft.Variable]:
    return [*optimizer.inner_optimizer.variables, *optimizer._unlisted_variables().values()]


def values_of(variables: Iterable[ft.Variable]) -> list[ft.Array]:
    """Returns the values of variables as NumPy arrays."""
    return [np.asarray(value) for value in tf_keras.backend.batch_get_value(list(variables))]

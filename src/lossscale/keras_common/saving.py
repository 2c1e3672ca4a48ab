"""The optimizer in the files of Keras 3 and tf_keras: all of it is loaded, or nothing.

The library writes and reads the inner optimizer itself, as a child of the wrapper, after the
wrapper. So the wrapper writes the shapes of the inner optimizer's arrays beside the loss scale:
they tell whether the library will be able to load these arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

import lossscale.framework_types as ft
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.packages import warn

SHAPES = "inner_shapes"
"""The name of the shapes in a file."""
_END = -1


def shapes_of(arrays: Iterable[ft.Array]) -> ft.Array:
    """Returns the shapes of arrays or variables as one array, with -1 at the end of each."""
    return np.asarray([size for each in arrays for size in (*each.shape, _END)], "int64")


def save(
    optimizer: KerasCommonOptimizer,
    store: ft.Store,
    values: Mapping[str, ft.Array],
    inner: ft.Variables,
) -> None:
    """Writes the wrapper's own values by name, and the shapes of the inner optimizer's arrays."""
    _show_inner(optimizer, True)
    for name, value in values.items():
        store[name] = value
    store[SHAPES] = shapes_of(inner)


def values_in(store: ft.Store) -> tuple[dict[str, ft.Array], list[ft.Array]]:
    """Returns the arrays in a place of a file: those with a name, and the numbered ones."""
    # A place in an HDF5 file is no Mapping and yields no items.
    named = {key: np.array(store[key]) for key in store.keys()}  # noqa: SIM118
    numbers = [str(number) for number in range(len(named))]
    return named, [named.pop(number) for number in numbers if number in named]


def load(
    optimizer: KerasCommonOptimizer,
    values: Mapping[str, ft.Array],
    named: Mapping[str, ft.Variable],
    inner: ft.Variables,
) -> None:
    """Sets the loss scale and the counters, if the library can load the inner optimizer too.

    Otherwise it warns, and nothing of the optimizer is loaded.

    Args:
        optimizer: The optimizer.
        values: The arrays of the file with a name.
        named: The wrapper's own variables, by the names in files.
        inner: The inner optimizer's variables.
    """
    own = {name: variable for name, variable in named.items() if name in values}
    found, expected = values.get(SHAPES, shapes_of(())), shapes_of(inner)
    fits = all(tuple(variable.shape) == values[name].shape for name, variable in own.items())
    fits = fits and np.array_equal(found, expected)
    _show_inner(optimizer, fits)
    if fits:
        optimizer._assign(list(own.values()), [values[name] for name in own])
        optimizer._state.write(optimizer._state.restored(values))
        return
    saved, here = (np.count_nonzero(each == _END) for each in (found, expected))
    warn(
        "The optimizer keeps its state, because that in the file does not fit: for the inner "
        f"optimizer it has {saved or 'no'} arrays, {type(optimizer.inner_optimizer).__name__} has "
        f"{here}{', of other shapes' if saved == here else ''}. Before loading the state of a "
        "LossScaleOptimizer, call model.optimizer.build(model.trainable_variables). Load that of "
        "an optimizer without loss scaling into a model that is compiled with "
        "`optimizer.inner_optimizer`. lossscale_migration.load_model reads .keras files of such "
        "models, and of Keras' own LossScaleOptimizer where arrays are missing."
    )


def _show_inner(optimizer: KerasCommonOptimizer, is_shown: bool) -> None:
    # The library saves and loads the attributes that dir() names.
    hidden = type(optimizer)._hidden
    optimizer.__dict__["_hidden"] = hidden if is_shown else hidden | {"inner_optimizer"}

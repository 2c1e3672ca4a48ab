"""The optimizer in the files of Keras 3 and tf_keras: all of it is loaded, or nothing.

The library writes and reads the inner optimizer itself, as a child of the wrapper, after the
wrapper. So the wrapper writes the class of the inner optimizer and the shapes of its arrays beside
the loss scale: they tell whether the library will load what belongs to this optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

import lossscale.framework_types as ft
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.packages import warn

SHAPES = "inner_shapes"
"""The name of the shapes in a file."""
_CLASS = "inner_class"
_END = -1


def shapes_of(arrays: Iterable[ft.Array]) -> ft.Array:
    """Returns the shapes of arrays or variables as one array, with -1 at the end of each."""
    return np.asarray([size for each in arrays for size in (*each.shape, _END)], "int64")


def _class_of(inner: ft.KerasOptimizer) -> str:
    """Returns the name of the first class of the library among the bases; "" for users' own."""
    roots = ("keras.", "tf_keras.")
    name = next(cls.__name__ for cls in type(inner).__mro__ if cls.__module__.startswith(roots))
    return "" if name.startswith("Optimizer") else name


def save(
    optimizer: KerasCommonOptimizer,
    store: ft.Store,
    values: Mapping[str, ft.Array],
    inner: ft.Variables,
) -> None:
    """Writes the wrapper's own values by name, and what tells whether the inner optimizer fits."""
    _show_inner(optimizer, True)
    for name, value in values.items():
        store[name] = value
    store[SHAPES] = shapes_of(inner)
    if name := _class_of(optimizer.inner_optimizer):
        # Files have numbers only.
        store[_CLASS] = np.frombuffer(name.encode("latin-1"), "uint8")


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
    # Of users' own classes, and of TensorFlow's files, no name is known.
    saved_class = bytes(values.get(_CLASS, b"")).decode("latin-1")
    own_class = _class_of(optimizer.inner_optimizer)
    fits = fits and ("" in (saved_class, own_class) or saved_class == own_class)
    _show_inner(optimizer, fits)
    if fits:
        optimizer._assign(list(own.values()), [values[name] for name in own])
        optimizer._state.write(optimizer._state.restored(values))
        return
    saved, here = (np.count_nonzero(each == _END) for each in (found, expected))
    shapes = ", of other shapes" if saved == here and saved_class in ("", own_class) else ""
    warn(
        "The optimizer keeps its state, because that in the file does not fit: for the inner "
        f"optimizer it has {saved or 'no'} arrays{saved_class and f' of {saved_class}'}, "
        f"{type(optimizer.inner_optimizer).__name__} has {here}{shapes}. "
        "The inner optimizer and the trainable variables must be those that were saved: set "
        "`trainable` as it was. Before loading the state of a LossScaleOptimizer, call "
        "model.optimizer.build(model.trainable_variables). Load that of an optimizer without loss "
        "scaling into a model that is compiled with `optimizer.inner_optimizer`. "
        "lossscale_migration.load_model reads .keras files of such models, and of Keras' own "
        "LossScaleOptimizer where arrays are missing."
    )


def _show_inner(optimizer: KerasCommonOptimizer, is_shown: bool) -> None:
    # The library saves and loads the attributes that dir() names.
    hidden = type(optimizer)._hidden
    optimizer.__dict__["_hidden"] = hidden if is_shown else hidden | {"inner_optimizer"}

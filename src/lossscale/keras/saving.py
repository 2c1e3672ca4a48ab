"""The optimizer in Keras' files and in TensorFlow's checkpoints, and how it is loaded.

In Keras' files the variables of an optimizer stand at one place, numbered. There the inner
optimizer's variables are written exactly as an optimizer without loss scaling writes its own,
and the loss scale beside them. So weights go from a plain Adam into a wrapped one, and back.

Files of Keras' own LossScaleOptimizer lack what an optimizer sets as attributes in `build`, such as
Nadam's product: it builds its inner optimizer with attribute tracking off.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

import lossscale.framework_types as ft
from lossscale.errors import ArgumentError
from lossscale.keras.slots import numpy_of
from lossscale.keras_common.optimizer import KerasCommonOptimizer, check_shapes
from lossscale.keras_common.state import AttributesOfInner, ValueStore
from lossscale.old_formats import begins_as_keras_own, kind_of, nadam_product
from lossscale.packages import warn

# Keras' own LossScaleOptimizer writes these before the inner optimizer's variables. The first
# two have no effect there.
_KERAS_OWN_VARIABLES = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


class SavedAttributes(AttributesOfInner, keras.losses.Loss):
    """The place of the inner optimizer's attributes in a Keras file."""


class LossScaleStore(ValueStore, keras.losses.Loss):
    """The place of the loss scale and the counters in a Keras file."""


# --- The inner optimizer's variables, by number ---------------------------------------------------


def is_of_own_class(
    optimizer: KerasCommonOptimizer, store: ft.Store, values: Sequence[ft.Array]
) -> bool:
    """Whether a place in a file is that of an optimizer of Keras' own class."""
    # Several optimizers in one begin alike.
    are_several = hasattr(optimizer.inner_optimizer, "optimizers")
    return bool(_count_of_keras_own(values)) and not are_several


def load_now(optimizer: KerasCommonOptimizer) -> None:
    """Sets the inner optimizer's variables from loaded values, if they exist."""
    count = len(optimizer._pending_values or ())
    if optimizer.built or count == len(optimizer.inner_optimizer.variables):
        load_pending(optimizer)


def load_pending(optimizer: KerasCommonOptimizer, *, at_build: bool = False) -> None:
    """Sets the inner optimizer's variables that were loaded before they existed.

    If they do not fit, the optimizer is left as if nothing had been loaded.

    Args:
        optimizer: The optimizer.
        at_build: Whether to warn that shapes do not fit, as Keras does of another number of arrays.

    Raises:
        ArgumentError: If shapes do not fit.
    """
    values, optimizer._pending_values = optimizer._pending_values, None
    before, optimizer._values_before_load = optimizer._values_before_load, None
    if values is None or before is None:
        return
    # The first step of a tf.function may build the optimizer. Traced assignments would set these
    # values again on every step.
    with optimizer._backend.eager_scope():
        optimizer._load_refused = True
        try:
            optimizer._load_refused = not load_arrays(optimizer, values)
        except ArgumentError as error:
            if not at_build:
                raise
            warn(f"The saved state of the optimizer is not used. {error}")
        finally:
            if optimizer._load_refused:
                # The counter too, which had the value of the file until `build`.
                set_own_values(optimizer, before)
                optimizer._iterations.assign(before["iteration"])


def can_load(optimizer: KerasCommonOptimizer, count: int) -> bool:
    """Whether a file with this many arrays can be one of the inner optimizer."""
    inner, ahead = len(optimizer.inner_optimizer.variables), len(_KERAS_OWN_VARIABLES)
    lacking = len(_places_files_may_lack(optimizer, count, 0, ahead))
    return count in (inner, inner + ahead, inner - lacking, inner + ahead - lacking)


def _count_of_keras_own(values: Sequence[ft.Array]) -> int:
    """The number of arrays that Keras' own class wrote before those of its inner optimizer."""
    # Not by their number: some optimizers (Adafactor) keep arrays that those files lack.
    first = [] if any(len(each.shape) for each in values[:3]) else map(numpy_of, values[:3])
    return len(_KERAS_OWN_VARIABLES) if begins_as_keras_own(list(first)) else 0


def load_arrays(optimizer: KerasCommonOptimizer, values: Sequence[ft.Array]) -> bool:
    """Sets the inner optimizer's variables from the arrays of a file.

    Returns:
        Whether they fit; otherwise nothing is changed.

    Raises:
        ArgumentError: If they are as many, of other shapes.
    """
    inner = optimizer.inner_optimizer
    listed, ahead = len(inner.variables), _count_of_keras_own(values)
    lacking = _places_files_may_lack(optimizer, len(values), ahead)
    missing = listed + ahead - len(values)
    # Several optimizers in one begin alike.
    ahead = ahead if missing in (0, len(lacking)) else 0
    own, values = dict(zip(_KERAS_OWN_VARIABLES, values[:ahead], strict=False)), values[ahead:]
    if lacking and missing == len(lacking):
        values = _completed(values, lacking, inner)
    numbered = {str(number): value for number, value in enumerate(values)}
    is_as_keras_loads = (
        type(inner).load_own_variables is keras.optimizers.Optimizer.load_own_variables
    )
    if is_as_keras_loads and len(values) != listed:
        # It warns, and changes nothing.
        inner.load_own_variables(numbered)
        return False
    if is_as_keras_loads:
        check_shapes(inner.variables, values)
    if own:
        restore_scale(optimizer, own)
    inner.load_own_variables(numbered)
    optimizer._iterations.follow()
    return True


def _places_files_may_lack(optimizer: KerasCommonOptimizer, count: int, *ahead: int) -> list[int]:
    inner = optimizer.inner_optimizer
    whole = count in [len(inner.variables) + more for more in ahead]
    if not optimizer.built or whole or hasattr(inner, "optimizers"):
        return []
    return _places_of_attributes(inner, optimizer._trainable_variables)


# --- The loss scale and the counters, by name -----------------------------------------------------


def own_values(optimizer: KerasCommonOptimizer) -> dict[str, Any]:
    """Returns the loss scale, the counters and variables of the user's, by their names in files."""
    return {name: numpy_of(variable) for name, variable in _named(optimizer).items()}


def _named(optimizer: KerasCommonOptimizer) -> dict[str, ft.Variable]:
    """Returns the variables of an optimizer that are not the inner one's, by unique names."""
    counters = optimizer._steps_skipped, optimizer._last_step_skipped, optimizer._iterations
    own = {each.name: each for each in (*optimizer._state.variables.values(), *counters)}
    named, known = dict(own), {id(each) for each in own.values()}
    for variable in optimizer._variables:
        if id(variable) not in known:
            names = itertools.chain(
                [variable.name], (f"{variable.name}_{number}" for number in itertools.count(1))
            )
            named[next(name for name in names if name not in named)] = variable
    return named


def set_own_values(optimizer: KerasCommonOptimizer, values: Mapping[str, Any]) -> None:
    """Sets the loss scale and the counters, moved into the range of the rule."""
    named = {name: each for name, each in _named(optimizer).items() if name in values}
    check_shapes(list(named.values()), [values[name] for name in named])
    restore_scale(optimizer, values)
    of_the_rule = optimizer._state.variables.values()
    excluded = {id(variable) for variable in (optimizer._iterations, *of_the_rule)}
    for name, variable in named.items():
        if id(variable) not in excluded:
            variable.assign(values[name])
    if optimizer.built or "iteration" not in values:
        optimizer._iterations.follow()
    else:
        # The inner optimizer's counter is kept with its other variables.
        optimizer._iterations.assign(values["iteration"])


def restore_scale(optimizer: KerasCommonOptimizer, values: Mapping[str, Any]) -> None:
    """Sets the state of the rule from numbers of a file by the names of its variables."""
    state = optimizer._state
    state.write(state.restored(values))


# --- Files that lack what an optimizer sets as attributes -----------------------------------------


def _places_of_attributes(inner: ft.KerasOptimizer, trained: ft.Variables) -> list[int]:
    """Returns which of an optimizer's variables its `build` sets as attributes, by their places.

    Args:
        inner: A built Keras optimizer.
        trained: The variables it was built with.
    """
    # Only `build` shows which attribute lists a variable, so a second optimizer is built.
    twin = type(inner).from_config(inner.get_config())
    added = {id(variable) for variable in twin.variables}
    track = twin._track_variable

    def track_and_note(variable: ft.Variable) -> None:
        added.add(id(variable))
        track(variable)

    twin.__dict__["_track_variable"] = track_and_note
    twin.build(list(trained))
    return [place for place, variable in enumerate(twin.variables) if id(variable) not in added]


def _completed(
    values: Sequence[ft.Array], lacking: list[int], inner: ft.KerasOptimizer
) -> list[ft.Array]:
    """Returns the values of a file with those that it lacks.

    Args:
        values: Arrays, of the inner optimizer's variables.
        lacking: Places of the missing ones among these variables.
        inner: The inner optimizer.
    """
    arrays, variables = iter(values), inner.variables
    filled = [
        numpy_of(variable) if place in lacking else next(arrays)
        for place, variable in enumerate(variables)
    ]
    missing = [variables[place] for place in lacking]
    product = getattr(inner, "_u_product", None)
    if kind_of(inner) == "Nadam" and [id(v) for v in missing] == [id(product)]:
        # These files count applied steps only, so the value can be computed.
        steps = int(filled[0])
        filled[lacking[0]] = np.asarray(nadam_product(float(inner.beta_1), steps), "float32")
    # For a variable with one axis, this is a placeholder that no step reads.
    elif not (type(inner).__name__ == "Adafactor" and not any(len(v.shape) for v in missing)):
        names = sorted({variable.path for variable in missing})
        warn(
            f"The file has no values for the variables {names} of {type(inner).__name__}: Keras' "
            "own LossScaleOptimizer does not write them. They stay as they are."
        )
    return filled


# --- TensorFlow's checkpoints ---------------------------------------------------------------------


def checkpoint_children(
    optimizer: KerasCommonOptimizer, children: dict[str, Any]
) -> dict[str, Any]:
    """Returns what a checkpoint has of an optimizer, by name.

    Args:
        optimizer: The optimizer.
        children: What Keras' base class lists.
    """
    # Keras lists none of the variables, and attributes are not all that a rule may have. The inner
    # optimizer comes first, so that a restore knows at once whose the other names are.
    inner = {"inner_optimizer": children["inner_optimizer"]}
    children = {**inner, **children, **_named(optimizer)}
    # The names of a plain optimizer, whose checkpoint `restore_plain` restores.
    for name in ("_variables", "_iterations"):
        children.pop(name, None)
    return {**children, "iteration": optimizer._iterations.value}


def lookup(optimizer: KerasCommonOptimizer, name: str, found: ft.Node) -> ft.Node:
    """Returns the child of a name in the checkpoint that is being restored, or None.

    Args:
        optimizer: The optimizer.
        name: A name in the file, which are asked for in its order.
        found: The child of this name.
    """
    state, theirs = optimizer.__dict__, optimizer.inner_optimizer._lookup_dependency(name)
    # First in the file of a wrapper. Later it may be an attribute of a plain optimizer.
    if name == "inner_optimizer" and (state["_restores_plain"] is None or theirs is None):
        state["_restores_plain"] = False
    elif name == "dynamic_scale" and state["_restores_plain"] and theirs is None:
        # The file of Keras' own class: what waits as an attribute is the inner optimizer.
        state["_restores_plain"] = False
        optimizer._handle_deferred_dependencies("inner_optimizer", optimizer.inner_optimizer)
    elif state["_restores_plain"] is not False:
        # Maybe the file of a plain optimizer, where the name can be the inner optimizer's.
        state["_restores_plain"] = True
        return found if theirs is None else None
    return found


def restore_plain(optimizer: KerasCommonOptimizer) -> None:
    """Restores what a plain optimizer has in a checkpoint where this optimizer stands."""
    inner, waiting = optimizer.inner_optimizer, optimizer._deferred_dependencies
    for name in list(waiting):
        child = inner._lookup_dependency(name)
        if child is not None:
            optimizer._handle_deferred_dependencies(name, child)
        else:
            # Until the inner optimizer is built.
            inner._deferred_dependencies.setdefault(name, []).extend(waiting.pop(name))

"""The optimizer in Keras' files and in TensorFlow's checkpoints, and how it is loaded.

In Keras' files the variables of an optimizer stand at one place, numbered. There the inner
optimizer's variables are written exactly as an optimizer without loss scaling writes its own,
and the loss scale beside them. So weights go from a plain Adam into a wrapped one, and back.

Files of Keras' own LossScaleOptimizer lack what an optimizer sets as attributes in `build`, such as
Nadam's product: it builds its inner optimizer with attribute tracking off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from lossscale.keras.slots import numpy_of
from lossscale.keras_common.state import ValueStore
from lossscale.old_formats import begins_as_keras_own, kind_of, nadam_product
from lossscale.packages import warn

# Keras' own LossScaleOptimizer writes these before the inner optimizer's variables. The first
# two have no effect there.
_KERAS_OWN_VARIABLES = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


class LossScaleStore(ValueStore, keras.losses.Loss):
    """The place of the loss scale and the counters in a Keras file."""


# --- The inner optimizer's variables, by number ---------------------------------------------------


def save(optimizer: Any, store: Any) -> None:
    """Writes the inner optimizer's variables, or loaded values that wait for them."""
    if optimizer._pending_values:
        for key, value in optimizer._pending_values.items():
            store[key] = value
    else:
        optimizer.inner_optimizer.save_own_variables(store)


def load(optimizer: Any, values: dict[str, Any]) -> None:
    """Sets the inner optimizer's variables, or keeps the values until they exist."""
    optimizer._pending_values = values
    if optimizer.built or len(values) == len(optimizer.inner_optimizer.variables):
        load_pending(optimizer)


def load_pending(optimizer: Any) -> None:
    """Sets the inner optimizer's variables that were loaded before they existed."""
    values, optimizer._pending_values = optimizer._pending_values, None
    if not values:
        return
    # The first step of a tf.function may build the optimizer. Traced assignments would set these
    # values again on every step.
    with optimizer._backend.eager_scope():
        load_inner(optimizer, values)


def can_load(optimizer: Any, count: int) -> bool:
    """Whether a file with this many arrays can be one of the inner optimizer."""
    inner, ahead = len(optimizer.inner_optimizer.variables), len(_KERAS_OWN_VARIABLES)
    lacking = len(_variables_files_may_lack(optimizer, count, 0, ahead))
    return count in (inner, inner + ahead, inner - lacking, inner + ahead - lacking)


def load_inner(optimizer: Any, values: dict[str, Any]) -> None:
    """Sets the inner optimizer's variables from the arrays of a file, by number."""
    inner = optimizer.inner_optimizer
    listed = len(inner.variables)
    # Not by their number: some optimizers (Adafactor) keep arrays that those files lack.
    first = [values[str(i)] for i in range(min(3, len(values)))]
    is_own = not any(len(each.shape) for each in first) and begins_as_keras_own(
        [numpy_of(each) for each in first]
    )
    ahead = len(_KERAS_OWN_VARIABLES) if is_own else 0
    lacking = _variables_files_may_lack(optimizer, len(values), ahead)
    if lacking and len(values) == listed - len(lacking) + ahead:
        values = _completed(values, ahead, lacking, inner)
    if ahead and len(values) == listed + ahead:
        own = {name: values[str(i)] for i, name in enumerate(_KERAS_OWN_VARIABLES)}
        numbered = {int(key) - ahead: value for key, value in values.items()}
        values = {str(key): value for key, value in numbered.items() if key >= 0}
        restore_scale(optimizer, own)
    inner.load_own_variables(values)
    optimizer._iterations.follow()


def _variables_files_may_lack(optimizer: Any, count: int, *ahead: int) -> list[int]:
    inner = optimizer.inner_optimizer
    whole = count in [len(inner.variables) + more for more in ahead]
    if not optimizer.built or whole or hasattr(inner, "optimizers"):
        return []
    return _places_of_attributes(inner, optimizer._trainable_variables)


# --- The loss scale and the counters, by name -----------------------------------------------------


def own_values(optimizer: Any) -> dict[str, Any]:
    """Returns the loss scale and the counters, by the names of their variables."""
    return {variable.name: numpy_of(variable) for variable in optimizer._variables}


def set_own_values(optimizer: Any, values: Mapping[str, Any]) -> None:
    """Sets the loss scale and the counters, moved into the range of the rule."""
    restore_scale(optimizer, values)
    of_the_rule = [] if optimizer._state is None else optimizer._state.variables.values()
    excluded = {id(variable) for variable in (optimizer._iterations, *of_the_rule)}
    for variable in optimizer._variables:
        if id(variable) not in excluded and variable.name in values:
            variable.assign(values[variable.name])
    if optimizer.built or "iteration" not in values:
        optimizer._iterations.follow()
    else:
        # The inner optimizer's counter is kept with its other variables.
        optimizer._iterations.assign(values["iteration"])


def restore_scale(optimizer: Any, values: Mapping[str, Any]) -> None:
    """Sets the state of the rule from numbers of a file by the names of its variables."""
    state = optimizer._state
    if state is None:
        return
    saved = {f: values[v.name].item() for f, v in state.variables.items() if v.name in values}
    state.write(state.restored(saved))


# --- Files that lack what an optimizer sets as attributes -----------------------------------------


def _places_of_attributes(inner: Any, trained: Sequence[Any]) -> list[int]:
    """Returns which of an optimizer's variables its `build` sets as attributes, by their places.

    Args:
        inner: A built Keras optimizer.
        trained: The variables it was built with.
    """
    # Only `build` shows which attribute lists a variable, so a second optimizer is built.
    twin = type(inner).from_config(inner.get_config())
    added = {id(variable) for variable in twin.variables}
    track = twin._track_variable

    def track_and_note(variable: Any) -> None:
        added.add(id(variable))
        track(variable)

    twin.__dict__["_track_variable"] = track_and_note
    twin.build(list(trained))
    return [place for place, variable in enumerate(twin.variables) if id(variable) not in added]


def _completed(
    values: Mapping[str, Any], own: int, lacking: Sequence[int], inner: Any
) -> dict[str, Any]:
    """Adds the missing values to those of a file.

    Args:
        values: Arrays by number: `own` others, then the inner optimizer's, of which some lack.
        own: How many come before those of the inner optimizer.
        lacking: Places of the missing ones among the inner optimizer's variables.
        inner: The inner optimizer.
    """
    saved = [values[str(number)] for number in range(len(values))]
    arrays = iter(saved[own:])
    variables = inner.variables
    filled = [
        numpy_of(variable) if place in lacking else next(arrays)
        for place, variable in enumerate(variables)
    ]
    missing = [variables[place] for place in lacking]
    product = getattr(inner, "_u_product", None)
    if kind_of(inner) == "Nadam" and [id(v) for v in missing] == [id(product)]:
        # These files count applied steps only, so the value can be computed.
        steps = int(filled[0])
        filled[lacking[0]] = nadam_product(float(inner.beta_1), steps)
    # For a variable with one axis, this is a placeholder that no step reads.
    elif not (type(inner).__name__ == "Adafactor" and not any(len(v.shape) for v in missing)):
        names = sorted({variable.path for variable in missing})
        warn(
            f"The file has no values for the variables {names} of {type(inner).__name__}: Keras' "
            "own LossScaleOptimizer does not write them. They stay as they are."
        )
    return {str(number): value for number, value in enumerate([*saved[:own], *filled])}


# --- TensorFlow's checkpoints ---------------------------------------------------------------------


def checkpoint_children(optimizer: Any, children: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint has of an optimizer, by name.

    Args:
        optimizer: The optimizer.
        children: What Keras' base class lists.
    """
    # Keras lists none of the variables, and attributes are not all that a rule may have.
    children = {**children, **{variable.name: variable for variable in optimizer._variables}}
    # The names of a plain optimizer, whose checkpoint `restore_plain` restores.
    for name in ("_variables", "_iterations"):
        children.pop(name, None)
    return {**children, "iteration": optimizer._iterations.value}


def restore_plain(optimizer: Any) -> None:
    """Restores what a plain optimizer has in a checkpoint where this optimizer stands."""
    inner, waiting = optimizer.inner_optimizer, optimizer._deferred_dependencies
    for name in list(waiting):
        child = inner._lookup_dependency(name)
        if child is not None:
            optimizer._handle_deferred_dependencies(name, child)
        else:
            # Until the inner optimizer is built.
            inner._deferred_dependencies.setdefault(name, []).extend(waiting.pop(name))

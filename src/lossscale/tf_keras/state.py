"""The variables that hold a rule's state, and their place in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lossscale.common import host_rule
from lossscale.keras_common.state import StateBody, kind_of_number
from lossscale.rules import ScaleRule, ScaleState, Seen
from lossscale.tensorflow import step
from lossscale.tensorflow.private_names import Trackable
from lossscale.tensorflow.step import grouped
from lossscale.tf_keras.private_names import track_variable

# The names that every release of TensorFlow wrote into checkpoints.
_VARIABLE_NAMES = {"scale": "current_loss_scale"}
_DTYPES = {"bool": tf.bool, "int": tf.int64, "float32": tf.float32}
_NAMESPACE = step.Folding(tf)


class State(StateBody):
    """A rule and the variables that hold its state; a fixed scale has none.

    Args:
        rule: The rule that moves the state.
        add_variable: Makes a scalar variable of a name, a dtype and a first value.
    """

    _read = staticmethod(tf.convert_to_tensor)

    def __init__(self, rule: ScaleRule, add_variable: Callable[[str, Any, Any], Any]) -> None:
        self.rule = rule
        self.first = rule.init()
        self.variables: dict[str, Any] = {}
        if rule.moves:
            for field, value in zip(self.first._fields, self.first, strict=True):
                name = _VARIABLE_NAMES.get(field, field)
                self.variables[field] = add_variable(name, _DTYPES[kind_of_number(value)], value)

    @property
    def named(self) -> dict[str, Any]:
        """The variables by their names in files."""
        return {_VARIABLE_NAMES.get(field, field): v for field, v in self.variables.items()}

    def write(self, state: ScaleState) -> Any:
        """Sets the state from tensors, arrays or Python numbers.

        Returns:
            The operation that does it in a graph; None in eager mode.
        """
        values = state._asdict()
        return grouped(
            [
                variable.assign(tf.cast(values[field], variable.dtype), read_value=False)
                for field, variable in self.variables.items()
            ]
        )

    def update(self, seen: Seen) -> Any:
        """Moves the state after a step.

        Args:
            seen: What the rule sees; with a boolean scalar tensor, or True, for its verdict.

        Returns:
            The operation that does it in a graph; None in eager mode.
        """
        in_graph = not tf.executing_eagerly() or tf.distribute.has_strategy()
        if not in_graph and host_rule.host_can_move(self.rule):
            before = self.first._replace(**step.numbers(self.variables))
            for field, value in host_rule.changes(self.rule, before, bool(seen.finite)).items():
                self.variables[field].assign(value, read_value=False)
            return None
        before = self.read()
        seen = seen._replace(finite=tf.convert_to_tensor(seen.finite))
        after = self.rule.update(before, seen, xp=_NAMESPACE)
        return None if after is before else self.write(after)


class LossScaleNode(Trackable):
    """The child `loss_scale` of an optimizer in a checkpoint.

    Args:
        children: Variables that TensorFlow's releases know, by name; a file must have them.
        extras: Variables that they do not know. They are written as attributes of this node, so
            that a file without them still restores, and matches all objects.
    """

    def __init__(self, children: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        self._children = dict(children)
        self._extras = dict(extras)
        with tf.init_scope():
            self._is_eager = tf.executing_eagerly()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # A SavedModel is written in a graph of its own, where only children have copies.
        extras = self._extras if save_type == "savedmodel" else {}
        return {**self._children, **extras, **super()._trackable_children(save_type, **kwargs)}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        found = {**self._children, **self._extras}.get(name)
        return found if found is not None else super()._lookup_dependency(name, cached_dependencies)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        in_graph = not tf.executing_eagerly()
        if in_graph and self._is_eager and not tf.compat.v1.get_default_graph().building_function:
            # There they are children.
            return {}
        return {name: tf.convert_to_tensor(variable) for name, variable in self._extras.items()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> Any:
        return grouped(
            [
                self._extras[name].assign(value, read_value=False)
                for name, value in restored_tensors.items()
            ]
        )


def new_variable(name: str, dtype: Any, value: Any) -> Any:
    """Returns a new scalar variable that every replica moves alike.

    Args:
        name: Its name.
        dtype: A TensorFlow dtype or its name; None stands for that of `value`.
        value: Its first value.
    """
    with tf.init_scope():
        variable = tf.Variable(
            value,
            dtype=dtype,
            trainable=False,
            name=name,
            # Every replica computes the same value.
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
    # In graphs of TensorFlow 1, Keras initializes the variables it knows.
    track_variable(variable)
    return variable

"""The variables of loss scaling, and their place in a checkpoint."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import numpy as np
import tensorflow as tf

import lossscale.framework_types as ft
from lossscale.common.private_names import private_name
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import ScaleRule
from lossscale.tensorflow.arrays import ARRAYS
from lossscale.tensorflow.tracing import grouped, where

_Trackable: ft.Class = private_name(
    "tensorflow",
    "__internal__.tracking.Trackable",
    "have a place in checkpoints that is not a `tf.Module`",
)
_track_variable: ft.Function = private_name(
    "tf_keras.src.backend",
    "track_variable",
    "have variables initialized in graphs of TensorFlow 1",
    fallback=lambda variable: None,
)
# The names that every release of TensorFlow wrote into checkpoints.
_VARIABLE_NAMES = {"scale": "current_loss_scale"}
# The loss scale where the inner optimizer has a child `loss_scale` or `base_optimizer`. This is no
# attribute's name.
_BESIDE = "lossscale.loss_scale"
_VALUE = "VARIABLE_VALUE"
_DTYPES = {"bool": tf.bool, "int": tf.int64, "float32": tf.float32}


class TFKerasScaleVariables(ScaleVariables):
    """A rule and the variables that hold its state; a fixed scale has none."""

    arrays = ARRAYS
    namespace = types.SimpleNamespace(**{**vars(tf), "where": where})
    _tensor = staticmethod(tf.convert_to_tensor)

    def __init__(self, rule: ScaleRule) -> None:
        fields = rule.init()._fields if rule.is_dynamic else ()
        names = {field: _VARIABLE_NAMES.get(field, field) for field in fields}
        super().__init__(
            rule, names, lambda name, kind, value: new_variable(name, _DTYPES[kind], value)
        )


class LossScaleNode(_Trackable):
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

    def _lookup_dependency(self, name: str, cached_dependencies: object = None) -> ft.Node:
        own = {**self._children, **self._extras}.get(name)
        return own if own is not None else super()._lookup_dependency(name, cached_dependencies)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        in_graph = not tf.executing_eagerly()
        if in_graph and self._is_eager and not tf.compat.v1.get_default_graph().building_function:
            # There they must be children.
            return {}
        return {name: tf.convert_to_tensor(variable) for name, variable in self._extras.items()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> ft.Operation:
        return grouped(
            [
                self._extras[name].assign(value, read_value=False)
                for name, value in restored_tensors.items()
            ]
        )


class CheckpointChildren:
    """The children of a loss scale optimizer in a checkpoint, without those of its inner optimizer.

    The latter keep their names. If the inner optimizer has a child `loss_scale` or
    `base_optimizer`, the loss scale stands under another name.

    Args:
        inner: The inner optimizer.
        loss_scale: The node of the loss scale; None if it has no variables.
        older: The node for files of TensorFlow 2.0 to 2.2.

    Raises:
        ArgumentError: If the inner optimizer has a child of that other name.
    """

    def __init__(self, inner: ft.KerasOptimizer, loss_scale: ft.Node, older: ft.Node) -> None:
        self._inner, self._loss_scale, self._older = inner, loss_scale, older
        self._check_free()
        # Whether both names are the inner optimizer's in the file that is being restored.
        self._are_theirs = False

    def _check_free(self) -> None:
        self._inner._maybe_initialize_trackable()
        child = self._inner._lookup_dependency(_BESIDE)
        if child is not None:
            raise ArgumentError(
                f"{type(self._inner).__name__} tracks a {type(child).__name__} as {_BESIDE!r}, "
                "where checkpoints have the loss scale. Track it under another name."
            )

    def beside(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the children of the inner optimizer, by name, and these."""
        # Every restore begins with this call.
        self._are_theirs = False
        self._check_free()
        own = {"loss_scale": self._loss_scale, "base_optimizer": self._older}
        if theirs.keys() & own.keys():
            # First, so that a restore meets this name before those that it is about. The second
            # name is for tf_keras' own class.
            own = {_BESIDE: self._loss_scale, "loss_scale": self._loss_scale}
        own = {n: each for n, each in own.items() if each is not None and n not in theirs}
        return {**own, **theirs}

    def found(self, name: str, taken: bool) -> ft.Node:
        """Returns the child of this name; None if it is not one of these.

        Args:
            name: A name in a file, which are asked for in its order.
            taken: Whether the inner optimizer has a child of this name.
        """
        if name == _BESIDE:
            # The inner optimizer may make its child later.
            self._are_theirs = True
            return self._loss_scale
        if taken or self._are_theirs:
            return None
        return {"loss_scale": self._loss_scale, "base_optimizer": self._older}.get(name)


class OlderNode(_Trackable):
    """The child `base_optimizer`, where TensorFlow 2.0 to 2.2 had the inner optimizer; empty."""

    def _lookup_dependency(self, name: str, cached_dependencies: object = None) -> NoReturn:
        raise UnsupportedError(
            "A checkpoint of TensorFlow 2.0 to 2.2 cannot be restored by TensorFlow. Received: one "
            f"with base_optimizer/{name}. Restore it with lossscale_migration.restore_checkpoint."
        )


class StepCounter(tf.Variable):
    """The step counter of the documents: a scalar int64 variable that is the sum of two others.

    The documents count every call of `apply_gradients`. The inner optimizer must not count a
    skipped one: Adam's bias correction and learning rate schedules follow its counter. In a
    checkpoint stands the inner optimizer's counter, where every release of TensorFlow wrote its
    only one, and beside the loss scale the number of skipped steps. So an old file restores as a
    run without skips, and a plain optimizer reads from ours the counter that its own updates need.
    Their sum is computed when it is read, and is right at once after any restore.

    Args:
        applied: Returns the inner optimizer's counter, which older optimizers make late.
        skipped: Number of skipped steps, an int64 scalar variable.
    """

    dtype = tf.int64
    shape = tf.TensorShape(())
    name = "iteration:0"
    trainable = False
    constraint = None
    synchronization = tf.VariableSynchronization.AUTO
    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    # The two variables have initializers of their own.
    initializer = None

    def __init__(self, applied: Callable[[], ft.Variable], skipped: ft.Variable) -> None:
        # Past tf.Variable, which is abstract and would make a variable of its own.
        self._applied = applied
        self._skipped = skipped

    def value(self) -> ft.Tensor:
        """Returns the number of steps, an int64 scalar tensor."""
        return tf.convert_to_tensor(self._applied()) + tf.convert_to_tensor(self._skipped)

    # The second is what a session fetches.
    read_value = _as_graph_element = value

    # The other arguments of a variable, such as `name`, have no effect on one that is a sum.

    def assign(self, value: ft.Scalar, *_: Any, **__: Any) -> Self | ft.Operation:
        """Sets the number of steps, and the inner optimizer's counter to it minus the skips.

        A number below the number of skips lowers that too: no optimizer works with a negative
        counter (Adam's bias correction becomes NaN).

        Returns:
            This counter in eager mode, otherwise the operation that sets it.
        """
        value = tf.cast(value, tf.int64)
        skipped = tf.minimum(tf.convert_to_tensor(self._skipped), value)
        done = grouped(
            self._skipped.assign(skipped, read_value=False),
            self._applied().assign(value - skipped, read_value=False),
        )
        return self if done is None else done

    def assign_add(self, delta: ft.Scalar, *_: Any, **__: Any) -> Self | ft.Operation:
        """Adds to the number of steps; see `assign`."""
        return self.assign(self.value() + tf.cast(delta, tf.int64))

    def assign_sub(self, delta: ft.Scalar, *_: Any, **__: Any) -> Self | ft.Operation:
        """Subtracts from the number of steps; see `assign`."""
        return self.assign(self.value() - tf.cast(delta, tf.int64))

    def numpy(self) -> ft.Scalar:
        """Returns the number of steps as a NumPy integer."""
        return self.value().numpy()

    def eval(self, session: object = None) -> ft.Scalar:
        """Returns the number of steps in a session of TensorFlow 1."""
        return self.value().eval(session=session)

    @property
    def device(self) -> str:
        """The device of the inner optimizer's counter."""
        return str(self._applied().device)

    @property
    def graph(self) -> object:
        """The graph of the inner optimizer's counter."""
        return self._applied().graph

    def __tf_tensor__(self, dtype: ft.DType = None, name: str | None = None) -> ft.Tensor:
        value = self.value()
        if dtype is not None and not dtype.is_compatible_with(value.dtype):
            raise TypeError(f"The step counter has the dtype int64, not {dtype.name}.")
        return value

    def __int__(self) -> int:
        return int(self.numpy())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __array__(self, dtype: ft.DType = None, copy: bool | None = None) -> ft.Array:
        return np.asarray(self.numpy(), dtype)

    # A checkpoint of it alone; in that of its optimizer stand the two counters.

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {_VALUE: self.value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> ft.Operation:
        return self.assign(restored_tensors[_VALUE])

    def __repr__(self) -> str:
        if tf.executing_eagerly():
            return f"<StepCounter numpy={int(self)}>"
        return "<StepCounter>"


def new_variable(name: str, dtype: ft.DType, value: ft.Scalar) -> ft.Variable:
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
    _track_variable(variable)
    return variable

"""The step counter of the documents: applied and skipped steps.

The documents count every call of `apply_gradients`. The inner optimizer must not count a skipped
one: Adam's bias correction and learning rate schedules follow its counter. In a checkpoint stands
the inner optimizer's counter, where every release of TensorFlow wrote its only one, and beside the
loss scale the number of skipped steps. So an old file restores as a run without skips, and a plain
optimizer reads from ours the counter that its own updates need. Their sum is computed when it is
read, and is right at once after any restore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale.tensorflow.step import grouped


class StepCounter(tf.Variable):
    """A scalar int64 variable that is the sum of two others.

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
    # Both parts have their own.
    initializer = None

    def __init__(self, applied: Callable[[], Any], skipped: Any) -> None:
        # Past tf.Variable, which is abstract and would make a variable of its own.
        self._applied = applied
        self._skipped = skipped

    def value(self) -> Any:
        """Returns the number of steps, an int64 scalar tensor."""
        return tf.convert_to_tensor(self._applied()) + tf.convert_to_tensor(self._skipped)

    def read_value(self) -> Any:
        """Returns the number of steps, an int64 scalar tensor."""
        return self.value()

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Sets the number of steps; the inner optimizer's counter becomes it less the skips.

        A number below that of the skips lowers that too: no optimizer works with a negative
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

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds to the number of steps; see `assign`."""
        return self.assign(self.value() + tf.cast(delta, tf.int64))

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts from the number of steps; see `assign`."""
        return self.assign(self.value() - tf.cast(delta, tf.int64))

    def numpy(self) -> Any:
        """Returns the number of steps as a NumPy integer."""
        return self.value().numpy()

    def eval(self, session: Any = None) -> Any:
        """Returns the number of steps in a session of TensorFlow 1."""
        return self.value().eval(session=session)

    def get_shape(self) -> Any:
        """Returns the shape, which is that of a scalar."""
        return self.shape

    @property
    def device(self) -> str:
        """The device of the inner optimizer's counter."""
        device: str = self._applied().device
        return device

    @property
    def graph(self) -> Any:
        """The graph of the inner optimizer's counter."""
        return self._applied().graph

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        value = self.value()
        if dtype is not None and not dtype.is_compatible_with(value.dtype):
            raise TypeError(f"The step counter has the dtype int64, not {dtype.name}.")
        return value

    def _as_graph_element(self) -> Any:
        # What a session fetches.
        return self.value()

    def __int__(self) -> int:
        return int(self.numpy())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        if tf.executing_eagerly():
            return f"<StepCounter numpy={int(self)}>"
        return "<StepCounter>"

"""The training step: judge the gradients, apply or skip, move the loss scale."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from lossscale.frameworks import tensorflow_ops
from lossscale.frameworks.checks import checked_pairs, with_gradient
from lossscale.frameworks.part import Part
from lossscale.frameworks.tf_keras.checks import is_variable
from lossscale.frameworks.watches.common import Seen
from lossscale.frameworks.watches.tensorflow import Watch


class TrainingStep(Part):
    """`apply_gradients`, and what every other verb leads to."""

    _warned_of_none: bool

    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _watch: ClassVar[Any] = None

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies gradients to variables, or skips the step; then moves the loss scale.

        Args:
            grads_and_vars: (gradient, variable) pairs, with the gradients that
                `get_unscaled_gradients` returned. A gradient is a tensor of the variable's shape,
                a `tf.IndexedSlices`, or None.
            name: Name of the operations, or None.
            skip_gradients_aggregation: Whether the gradients were already summed over the
                replicas of a strategy; then they are not summed again.
            experimental_aggregate_gradients: The opposite, under its older name.

        Returns:
            `iterations`, which has grown by 1, whether the step was applied or skipped; inside a
            `tf.function` its value, and in a graph of TensorFlow 1 the operation that does the
            step.

        Raises:
            TypeError: If `grads_and_vars` does not hold pairs.
            ValueError: If no variable has a gradient.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
            >>> weight = tf.Variable([1.0, 2.0])
            >>> scaled = optimizer.get_scaled_loss(tf.constant([2.0, float("inf")]))
            >>> gradients = optimizer.get_unscaled_gradients([scaled])
            >>> steps = optimizer.apply_gradients(zip(gradients, [weight]))
            >>> weight.numpy(), int(optimizer.steps_skipped), float(optimizer.loss_scale)
            (array([1., 2.], dtype=float32), 1, 16384.0)
        """
        gradients, variables = checked_pairs(grads_and_vars, is_variable)
        tensorflow_ops.check_replica_context()
        moved = with_gradient(gradients, variables)
        place = tensorflow_ops.current_place()
        # Never: nothing here leaves scaled gradients to be applied. But it warns.
        self._convention.are_scaled(place, moved)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        done = self._step(gradients, variables, name=name, aggregate=aggregate)
        self._convention.note_applied(place, moved)
        return done

    def _step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        name: str | None = None,
        aggregate: bool = True,
    ) -> Any:
        # An optimizer is often made outside the strategy that it is used under.
        tensorflow_ops.check_strategy()
        with tf.init_scope():
            self._build(list(variables), [g is not None for g in gradients])
        pairs = self._with_gradients(gradients, variables)
        if aggregate:
            pairs = list(self._aggregated(pairs))
        trained = [variable for _, variable in pairs]

        def apply_inner(gradients: Sequence[Any], scale: None) -> Any:
            return self._apply_inner(list(zip(gradients, trained, strict=True)), name)

        gradients = [gradient for gradient, _ in pairs]
        # Summed gradients are the same on all replicas; others are not, and neither must be what
        # an aggregation of the user's returned.
        finite = tensorflow_ops.agreed(self._judge(gradients, trained, None))
        if self._watch is not None:
            self._note(gradients, trained, finite)
        gate = (lambda: self._written(trained)) if self._can_gate(gradients) else None
        done = tensorflow_ops.apply_or_skip(
            finite, gradients, None, apply_inner, self._move_scale, gate
        )
        return self._result(done)

    def _note(self, gradients: Sequence[Any], variables: Sequence[Any], finite: Any) -> None:
        """Notes a step that was decided on and not done yet; only for an optimizer with a watch."""
        with tf.init_scope():
            self._build_watch(variables)
        scale = tf.convert_to_tensor(self._current_scale())
        step = tf.convert_to_tensor(self.iterations) + 1
        # These gradients are summed over the replicas already.
        self._watch.note(Seen(gradients, variables, list, finite, scale, step, is_shared=True))

    def _start_watch(self, histograms_every: int | None) -> None:
        """Lets steps note what a monitor reads; takes effect in functions that are traced later.

        Args:
            histograms_every: At which multiples of this step number exponents are counted; None
                for never.
        """
        # Past TensorFlow's attribute tracking.
        self.__dict__["_watch"] = Watch(histograms_every)

    def _build_watch(self, variables: Sequence[Any]) -> None:
        names = [variable.name.removesuffix(":0") for variable in variables]
        self._watch.build(variables, names, [variable.dtype.name for variable in variables])

    def _with_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        pairs = list(zip(gradients, variables, strict=True))
        without = [variable.name for gradient, variable in pairs if gradient is None]
        if without and not self._warned_of_none:
            self._warned_of_none = True
            warnings.warn(
                f"Gradients do not exist for the variables {without}; they stay as they are.",
                UserWarning,
                stacklevel=4,
            )
        return [(gradient, variable) for gradient, variable in pairs if gradient is not None]

    def _result(self, done: Any) -> Any:
        if tf.executing_eagerly():
            return self.iterations
        if tf.compat.v1.get_default_graph().building_function:
            return tensorflow_ops.after(done, self.iterations.value)
        return done

    def _scaled(self, loss: Any) -> Any:
        if callable(loss):
            return lambda: self._scaled(loss())
        return tensorflow_ops.scaled(loss, self._current_scale())

    def _unscaled(
        self, gradients: Iterable[Any], variables: Sequence[Any], scale: Any
    ) -> list[Any]:
        """Returns gradients divided by a scale; as they are if it is None."""
        gradients = list(gradients)
        if scale is None:
            return gradients
        return list(tensorflow_ops.unscaled(gradients, scale, self._rule.powers_of_two))

    # What a LossScale object of the older API replaces: the scale, the verdict, the move.

    def _current_scale(self) -> Any:
        return self._rule.loss_scale(self._state.read())

    def _judge(self, gradients: Sequence[Any], variables: Sequence[Any], scale: None) -> Any:
        """Whether the step is applied: a boolean scalar tensor, or True if nothing is checked.

        Args:
            gradients: Those of the step, unscaled.
            variables: Their variables.
            scale: None, because nothing is left to divide by.
        """
        return tensorflow_ops.all_finite(gradients) if self._rule.checks_gradients else True

    def _move_scale(self, finite: Any) -> Any:
        done = [] if self._state is None else [self._state.update(finite)]
        if finite is not True:
            known = tensorflow_ops.known(finite)
            skipped = tf.logical_not(finite) if known is None else not known
            done.append(self._last_step_skipped.assign(skipped, read_value=False))
            if known is None or skipped:
                count = tf.cast(skipped, tf.int64)
                done.append(self._steps_skipped.assign_add(count, read_value=False))
        return done

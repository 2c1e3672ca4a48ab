"""The training step: judge the gradients, apply or skip, move the loss scale."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from lossscale.frameworks.common.autograph import as_written
from lossscale.frameworks.common.checks import checked_pairs, with_gradient
from lossscale.frameworks.common.notes import DecidedStep
from lossscale.frameworks.tensorflow import arrays, magnitudes, replicas, step
from lossscale.frameworks.tensorflow import finite as finite_check
from lossscale.frameworks.tensorflow.notes import Notes
from lossscale.frameworks.tf_keras.checks import is_variable
from lossscale.frameworks.tf_keras.parts import Parts
from lossscale.rules import Needs, Seen


class TrainingStep(Parts):
    """`apply_gradients`, and what every other verb leads to."""

    _warned_of_none: bool

    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _notes: ClassVar[Any] = None

    @as_written
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        gradients, variables = checked_pairs(grads_and_vars, is_variable)
        replicas.check_replica_context()
        moved = with_gradient(gradients, variables)
        place = replicas.current_place()
        # Never: nothing here leaves scaled gradients to be applied. But it warns.
        self._handover.are_scaled(place, moved)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        done = self._step(gradients, variables, name=name, aggregate=aggregate)
        self._handover.note_applied(place, moved)
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
        replicas.check_strategy()
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
        finite = replicas.agreed(self._is_finite(gradients))
        scale = None if self._rule.needs == Needs() else self._current_scale()
        seen = magnitudes.seen(
            self._rule.needs, finite, gradients, scale, are_scaled=False, are_shared=aggregate
        )
        if self._notes is not None:
            self._note(gradients, trained, finite)
        gate = (lambda: self._written(trained)) if self._can_gate(gradients) else None
        done = step.apply_or_skip(seen, gradients, None, apply_inner, self._move_scale, gate)
        return self._result(done)

    def _note(self, gradients: Sequence[Any], variables: Sequence[Any], finite: Any) -> None:
        """Notes a step that was decided on and not done yet, where notes are kept."""
        with tf.init_scope():
            self._build_notes(variables)
        scale = tf.convert_to_tensor(self._current_scale())
        step = tf.convert_to_tensor(self.iterations) + 1
        # These gradients are summed over the replicas already.
        self._notes.note(
            DecidedStep(gradients, variables, list, finite, scale, step, is_shared=True)
        )

    def _keep_notes(self, histograms_every: int | None) -> None:
        """Lets steps note what a monitor reads; takes effect in functions that are traced later.

        Args:
            histograms_every: At which multiples of this step number exponents are counted; None
                for never.
        """
        # Past TensorFlow's attribute tracking.
        self.__dict__["_notes"] = Notes(histograms_every)

    def _build_notes(self, variables: Sequence[Any]) -> None:
        names = [variable.name.removesuffix(":0") for variable in variables]
        self._notes.build(variables, names, [variable.dtype.name for variable in variables])

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
            return step.after(done, self.iterations.value)
        return done

    def _scaled(self, loss: Any) -> Any:
        if callable(loss):
            return lambda: self._scaled(loss())
        return arrays.scaled(loss, self._current_scale())

    # What a LossScale object of the older API replaces.

    def _current_scale(self) -> Any:
        # A loss scale that moves by itself has a method of its own in this place.
        assert self._state is not None
        return self._rule.loss_scale(self._state.read())

    def _is_finite(self, gradients: Sequence[Any]) -> Any:
        """Whether the step is applied: a boolean scalar tensor, or True if nothing is checked."""
        if self._state is None:
            return self._decide(list(gradients))
        return finite_check.all_finite(gradients) if self._rule.checks_gradients else True

    def _move_scale(self, seen: Seen) -> Any:
        done = [] if self._state is None else [self._state.update(seen)]
        finite = seen.finite
        if finite is not True:
            known = step.known(finite)
            skipped = tf.logical_not(finite) if known is None else not known
            done.append(self._last_step_skipped.assign(skipped, read_value=False))
            if known is None or skipped:
                count = tf.cast(skipped, tf.int64)
                done.append(self._steps_skipped.assign_add(count, read_value=False))
        return done

"""The training step: judge the gradients, apply or skip, move the loss scale."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale.common.notes import DecidedStep
from lossscale.keras_common.training import SharedTraining
from lossscale.rules import Needs, Seen
from lossscale.tensorflow import finite as finite_check
from lossscale.tensorflow import magnitudes, replicas, step
from lossscale.tensorflow.notes import Notes
from lossscale.tf_keras.parts import Parts


class TrainingStep(SharedTraining, Parts):
    """The step that every verb leads to."""

    _warned_of_none: bool

    def _check_context(self) -> None:
        replicas.check_replica_context()

    def _apply_step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        name: str | None,
        *,
        scaled: bool,
        aggregate: bool,
    ) -> Any:
        # Never scaled: nothing here leaves scaled gradients to be applied.
        return self._step(gradients, variables, name=name, aggregate=aggregate)

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
        assert self._notes is not None
        # These gradients are summed over the replicas already.
        self._notes.note(
            DecidedStep(gradients, variables, list, finite, scale, step, is_shared=True)
        )

    def _new_notes(self, histograms_every: int | None) -> Notes:
        return Notes(histograms_every)

    def _build_notes(self, variables: Sequence[Any]) -> None:
        if self._notes is None:
            return
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

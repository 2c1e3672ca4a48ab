"""The documented calls of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale.common.checks import scaled_value
from lossscale.keras_common.verbs import SharedVerbs
from lossscale.tensorflow import replicas, step
from lossscale.tensorflow.tape import check_symbolic, recorded
from lossscale.tf_keras.checks import flat_variables
from lossscale.tf_keras.parts import Parts


class DocumentedVerbs(SharedVerbs, Parts):
    """`minimize`, `compute_gradients`, and how gradients are computed."""

    def minimize(
        self,
        loss: Any,
        var_list: Any = None,
        grad_loss: Any = None,
        name: str | None = None,
        tape: Any = None,
    ) -> Any:
        if isinstance(grad_loss, tf.GradientTape):
            # The new optimizers of tf_keras take the tape in this place.
            grad_loss, tape = None, grad_loss
        place = replicas.current_place()
        with self._handover.aside(place):
            pairs = list(self._computed(loss, var_list, grad_loss, tape))
            if not pairs and var_list is not None:
                return self._result(step.grouped())
            return self._apply_unscaled(place, pairs, name)

    def _computed(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> Any:
        # As TensorFlow did: an override need not know an argument that nobody gives.
        given = {} if grad_loss is None else {"grad_loss": grad_loss}
        return self.compute_gradients(loss, var_list, tape=tape, **given)

    def _differentiated(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of the scaled loss, and the variables they belong to."""

        def scale(loss: Any) -> Any:
            scaled = scaled_value(loss, self.get_scaled_loss)
            if grad_loss is None:
                return scaled
            return tf.reduce_sum(scaled * tf.stop_gradient(tf.cast(grad_loss, scaled.dtype)))

        given = var_list is not None and not callable(var_list)
        watch = flat_variables(var_list) if given else []
        recording = recorded(loss, var_list, scale, tape=tape, watch=watch)
        variables = flat_variables(recording.variables)
        pairs = self._inner_gradients(recording.loss, variables, recording.tape)
        return [gradient for gradient, _ in pairs], variables

    def _symbolic(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        check_symbolic(loss)
        return self._symbolic_gradients(self.get_scaled_loss(loss), params)

    def compute_gradients(
        self, loss: Any, var_list: Any = None, tape: Any = None, grad_loss: Any = None
    ) -> list[tuple[Any, Any]]:
        """Returns (gradient, variable) pairs for `apply_gradients`; the first half of `minimize`.

        Args:
            loss: As for `minimize`.
            var_list: As for `minimize`.
            tape: As for `minimize`.
            grad_loss: As for `minimize`.

        Raises:
            ValueError: If `var_list` holds something else than variables, or if `loss` is a
                tensor without a tape.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD())
            >>> weight = tf.Variable(3.0)
            >>> [(gradient, _)] = optimizer.compute_gradients(lambda: weight**2, [weight])
            >>> float(gradient)
            6.0
        """
        place = replicas.current_place()
        with self._handover.aside(place):
            scaled, variables = self._differentiated(loss, var_list, grad_loss, tape)
            gradients = self._unscaled_by_verb(scaled, variables)
        self._handover.note_unscaled(place, len(gradients))
        return list(zip(gradients, variables, strict=True))

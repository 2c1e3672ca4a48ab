"""The documented calls of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.frameworks.common.autograph import as_written
from lossscale.frameworks.common.checks import scaled_value
from lossscale.frameworks.tensorflow import arrays, replicas, step
from lossscale.frameworks.tensorflow.tape import check_symbolic, recorded
from lossscale.frameworks.tf_keras.checks import flat_variables
from lossscale.frameworks.tf_keras.parts import Parts


class DocumentedVerbs(Parts):
    """`minimize`, `get_scaled_loss`, `get_unscaled_gradients`, `get_gradients`, `get_updates`."""

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

    def _apply_unscaled(self, place: Any, pairs: list[Any], name: str | None) -> Any:
        # Also where a subclass unscales by itself, without the method that notes it.
        self._handover.note_all_unscaled(place)
        named: dict[str, Any] = {} if name is None else {"name": name}
        return self.apply_gradients(pairs, **named)

    def _differentiated(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the unscaled gradients of a loss, and the variables they belong to."""

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
        return list(self.get_unscaled_gradients([gradient for gradient, _ in pairs])), variables

    @as_written
    def get_scaled_loss(self, loss: Any) -> Any:
        self._handover.note_get_scaled_loss()
        return self._scaled(loss)

    @as_written
    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        try:
            gradients = list(grads)
        except TypeError:
            raise ArgumentTypeError(
                f"`grads` must be a list of gradients. Received: {grads!r}."
            ) from None
        number = sum(gradient is not None for gradient in gradients)
        self._handover.note_unscaled(replicas.current_place(), number)
        return list(arrays.unscaled(gradients, self._current_scale(), self._rule.powers_of_two))

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
            gradients, variables = self._differentiated(loss, var_list, grad_loss, tape)
        self._handover.note_unscaled(place, len(gradients))
        return list(zip(gradients, variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        place = replicas.current_place()
        with self._handover.aside(place):
            gradients = self._gradients_of(loss, flat_variables(params))
        self._handover.note_unscaled(place, len(gradients))
        return gradients

    def _gradients_of(self, loss: Any, variables: Sequence[Any]) -> list[Any]:
        if callable(loss):
            gradients, _ = self._differentiated(loss, variables)
        else:
            check_symbolic(loss)
            scaled = self._symbolic_gradients(self.get_scaled_loss(loss), variables)
            gradients = list(self.get_unscaled_gradients(scaled))
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                raise GradientsError(
                    f"The loss has no gradient with respect to {variable.name!r}: it does not "
                    "depend on it, or an operation between them has no gradient. Leave the "
                    "variable out of `params`."
                )
        return gradients

    def get_updates(self, loss: Any, params: Any) -> list[Any]:
        place = replicas.current_place()
        with self._handover.aside(place):
            gradients = self.get_gradients(loss, params)
            pairs = list(zip(gradients, flat_variables(params), strict=True))
            return [self._apply_unscaled(place, pairs, None)]

"""The documented calls of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.frameworks import tensorflow_ops
from lossscale.frameworks.checks import scaled_value
from lossscale.frameworks.part import Part
from lossscale.frameworks.tf_keras.checks import flat_variables


class DocumentedVerbs(Part):
    """`minimize`, `get_scaled_loss`, `get_unscaled_gradients`, `get_gradients`, `get_updates`."""

    def minimize(
        self,
        loss: Any,
        var_list: Any = None,
        grad_loss: Any = None,
        name: str | None = None,
        tape: Any = None,
    ) -> Any:
        """Minimizes a loss: scales it, takes and unscales gradients, applies them.

        It does so by `get_scaled_loss`, `get_unscaled_gradients` and `apply_gradients`, those of
        a subclass if it has its own.

        Args:
            loss: A callable without arguments that returns the loss; or a tensor, with the
                `tape` that recorded it.
            var_list: The variables to update: a list or tuple, one variable, or a callable that
                returns these. None stands for the trainable variables that the tape watched. An
                empty list updates nothing, and is no step.
            grad_loss: Tensor of the loss's shape that multiplies its gradient, or None.
            name: Name of the operations, or None.
            tape: The `tf.GradientTape` that recorded `loss`, if `loss` is a tensor.

        Returns:
            What `apply_gradients` returns.

        Raises:
            ValueError: If `var_list` holds something else than variables, if no variable has a
                gradient, or if `loss` is a tensor without a tape.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD(0.25))
            >>> weight = tf.Variable(1.0)
            >>> steps = optimizer.minimize(lambda: weight**2, [weight])
            >>> float(weight), int(steps)
            (0.5, 1)
        """
        if isinstance(grad_loss, tf.GradientTape):
            # The new optimizers of tf_keras take the tape in this place.
            grad_loss, tape = None, grad_loss
        place = tensorflow_ops.current_place()
        with self._convention.aside(place):
            pairs = list(self._computed(loss, var_list, grad_loss, tape))
            if not pairs and var_list is not None:
                return self._result(tensorflow_ops.grouped())
            return self._apply_unscaled(place, pairs, name)

    def _computed(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> Any:
        # As TensorFlow did: an override need not know an argument that nobody gives.
        given = {} if grad_loss is None else {"grad_loss": grad_loss}
        return self.compute_gradients(loss, var_list, tape=tape, **given)

    def _apply_unscaled(self, place: Any, pairs: list[Any], name: str | None) -> Any:
        # Also where a subclass unscales by itself, without the method that notes it.
        self._convention.note_all_unscaled(place)
        named = {} if name is None else {"name": name}
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
        recording = tensorflow_ops.recorded(loss, var_list, scale, tape=tape, watch=watch)
        variables = flat_variables(recording.variables)
        pairs = self._inner_gradients(recording.loss, variables, recording.tape)
        return list(self.get_unscaled_gradients([gradient for gradient, _ in pairs])), variables

    def get_scaled_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale.

        For gradients taken by hand, as with `tf.GradientTape`; `minimize` does it by itself.
        Call `get_unscaled_gradients` afterwards.

        Args:
            loss: Tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider, so that the scaled value of a float16 loss does not
            overflow. For a callable, a callable that reads the scale when it is called.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(
            ...     tf_keras.optimizers.SGD(), initial_scale=8)
            >>> float(optimizer.get_scaled_loss(tf.constant(0.5)))
            4.0
        """
        self._convention.note_get_scaled_loss()
        return self._scaled(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Divides gradients by the loss scale.

        For gradients of a loss from `get_scaled_loss`.

        Args:
            grads: Tensors, `tf.IndexedSlices` or None, in any iterable.

        Returns:
            A new list of the same length, in float32 or wider: float16 cannot hold the small
            values that scaling protected. None stays None, sparse stays sparse.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(
            ...     tf_keras.optimizers.SGD(), initial_scale=8)
            >>> gradient, missing = optimizer.get_unscaled_gradients([tf.constant([4.0]), None])
            >>> gradient.numpy(), missing
            (array([0.5], dtype=float32), None)
        """
        try:
            gradients = list(grads)
        except TypeError:
            raise ArgumentTypeError(
                f"`grads` must be a list of gradients. Received: {grads!r}."
            ) from None
        number = sum(gradient is not None for gradient in gradients)
        self._convention.note_unscaled(tensorflow_ops.current_place(), number)
        return list(
            tensorflow_ops.unscaled(gradients, self._current_scale(), self._rule.powers_of_two)
        )

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
        place = tensorflow_ops.current_place()
        with self._convention.aside(place):
            gradients, variables = self._differentiated(loss, var_list, grad_loss, tape)
        self._convention.note_unscaled(place, len(gradients))
        return list(zip(gradients, variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Returns the unscaled gradients of a loss, which was scaled to compute them.

        Args:
            loss: A callable without arguments; or, inside a `tf.function` or a graph, a tensor.
            params: List of variables.

        Returns:
            List of gradient tensors, in float32 or wider.

        Raises:
            ValueError: If a gradient cannot be computed.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD())
            >>> weight = tf.Variable(3.0)
            >>> float(optimizer.get_gradients(lambda: weight**2, [weight])[0])
            6.0
        """
        place = tensorflow_ops.current_place()
        with self._convention.aside(place):
            gradients = self._gradients_of(loss, flat_variables(params))
        self._convention.note_unscaled(place, len(gradients))
        return gradients

    def _gradients_of(self, loss: Any, variables: Sequence[Any]) -> list[Any]:
        if callable(loss):
            gradients, _ = self._differentiated(loss, variables)
        else:
            tensorflow_ops.check_symbolic(loss)
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
        """Computes gradients as `get_gradients` does, and applies them.

        Args:
            loss: A callable without arguments; or, inside a `tf.function` or a graph, a tensor.
            params: List of variables.

        Returns:
            A list with what `apply_gradients` returns.

        Raises:
            ValueError: If a gradient cannot be computed.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
            >>> weight = tf.Variable(3.0)
            >>> updates = optimizer.get_updates(lambda: weight**2, [weight])
            >>> float(weight)
            0.0
        """
        place = tensorflow_ops.current_place()
        with self._convention.aside(place):
            gradients = self.get_gradients(loss, params)
            pairs = list(zip(gradients, flat_variables(params), strict=True))
            return [self._apply_unscaled(place, pairs, None)]

"""The documented calls of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.frameworks.part import Part


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
                returns these. None stands for the trainable variables that the tape watched.
            grad_loss: Tensor of the loss's shape that multiplies its gradient, or None.
            name: Name of the operations, or None.
            tape: The `tf.GradientTape` that recorded `loss`, if `loss` is a tensor.

        Returns:
            What `apply_gradients` returns: `iterations`, which has grown by 1.

        Raises:
            ValueError: If `var_list` holds something else than variables, if no variable has a
                gradient, or if `loss` is a tensor without a tape.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.25))
            >>> weight = tf.Variable(1.0)
            >>> steps = optimizer.minimize(lambda: weight**2, [weight])
            >>> float(weight), int(steps)
            (0.5, 1)
        """
        place = self._engine.current_place()
        with self._convention.aside(place):
            gradients, variables = self._engine.differentiate(
                loss, var_list, self.get_scaled_loss, tape=tape, grad_loss=grad_loss
            )
            unscaled = self._unscaled_by_verb(gradients, variables)
            return self._apply_unscaled(place, unscaled, variables, name)

    def _unscaled_by_verb(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        multiplied = self._multiplied(gradients, variables)
        return [
            given if kept is None else unscaled
            for given, kept, unscaled in zip(
                gradients, multiplied, self.get_unscaled_gradients(multiplied), strict=True
            )
        ]

    def _apply_unscaled(
        self, place: Any, gradients: Sequence[Any], variables: Sequence[Any], name: str | None
    ) -> Any:
        # Also where a subclass unscales by itself, without the method that notes it.
        self._convention.note_all_unscaled(place)
        named = {} if name is None else {"name": name}
        return self.apply_gradients(list(zip(gradients, variables, strict=True)), **named)

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
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
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
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
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
        self._convention.note_unscaled(self._engine.current_place(), _number(gradients))
        scale = self._current_scale()
        return list(self._engine.unscaled(gradients, scale, self._rule.powers_of_two))

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Returns the unscaled gradients of a loss, which was scaled to compute them.

        Args:
            loss: A callable without arguments; or, inside a `tf.function`, a tensor.
            params: List of variables.

        Returns:
            List of gradient tensors, in float32 or wider.

        Raises:
            ValueError: If a gradient cannot be computed.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
            >>> weight = tf.Variable(3.0)
            >>> float(optimizer.get_gradients(lambda: weight**2, [weight])[0])
            6.0
        """
        place = self._engine.current_place()
        params = self._engine.flat_variables(params)
        with self._convention.aside(place):
            gradients = self._gradients_of(loss, params)
        self._convention.note_unscaled(place, len(gradients))
        return gradients

    def _gradients_of(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        if callable(loss):
            gradients, _ = self._engine.differentiate(loss, params, self.get_scaled_loss)
        else:
            gradients = self._engine.symbolic_gradients(self.get_scaled_loss(loss), params)
        for gradient, variable in zip(gradients, params, strict=True):
            if gradient is None:
                raise GradientsError(
                    f"The loss has no gradient with respect to {variable.name!r}: it does not "
                    "depend on it, or an operation between them has no gradient. Leave the "
                    "variable out of `params`."
                )
        return self._unscaled_by_verb(gradients, params)

    def get_updates(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Computes gradients as `get_gradients` does, and applies them.

        Args:
            loss: A callable without arguments; or, inside a `tf.function`, a tensor.
            params: List of variables.

        Returns:
            A list with what `apply_gradients` returns: `iterations`, which has grown by 1.

        Raises:
            ValueError: If a gradient cannot be computed.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
            >>> weight = tf.Variable(3.0)
            >>> updates = optimizer.get_updates(lambda: weight**2, [weight])
            >>> float(weight)
            0.0
        """
        place = self._engine.current_place()
        with self._convention.aside(place):
            gradients = self.get_gradients(loss, params)
            variables = self._engine.flat_variables(params)
            return [self._apply_unscaled(place, gradients, variables, None)]


def _number(gradients: Sequence[Any]) -> int:
    return sum(gradient is not None for gradient in gradients)

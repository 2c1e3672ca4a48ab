"""The documented calls of a training loop of one's own, as far as the generations share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lossscale.common.autograph import as_written
from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.keras_common.parts import SharedParts


class SharedVerbs(SharedParts):
    """`get_scaled_loss`, `get_unscaled_gradients`, `get_gradients`, `get_updates`."""

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
        self._handover.note_unscaled(self._backend.current_place(), number)
        scale = self._current_scale()
        return list(self._backend.unscaled(gradients, scale, self._rule.powers_of_two))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        place = self._backend.current_place()
        params = self._backend.flat_variables(params)
        with self._handover.aside(place):
            gradients = self._gradients_of(loss, params)
        self._handover.note_unscaled(place, len(gradients))
        return gradients

    def _gradients_of(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        if callable(loss):
            gradients, _ = self._differentiated(loss, params)
        else:
            gradients = self._symbolic(loss, params)
        for gradient, variable in zip(gradients, params, strict=True):
            if gradient is None:
                raise GradientsError(
                    f"The loss has no gradient with respect to {variable.name!r}: it does not "
                    "depend on it, or an operation between them has no gradient. Leave the "
                    "variable out of `params`."
                )
        return self._unscaled_by_verb(gradients, params)

    def get_updates(self, loss: Any, params: Any) -> list[Any]:
        place = self._backend.current_place()
        with self._handover.aside(place):
            gradients = self.get_gradients(loss, params)
            pairs = list(zip(gradients, self._backend.flat_variables(params), strict=True))
            return [self._apply_unscaled(place, pairs, None)]

    def _apply_unscaled(self, place: Any, pairs: list[Any], name: str | None) -> Any:
        # Also where a subclass unscales by itself, without the method that notes it.
        self._handover.note_all_unscaled(place)
        named: dict[str, Any] = {} if name is None else {"name": name}
        return self.apply_gradients(pairs, **named)

    # What differs.

    def _differentiated(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of the scaled loss, and the variables they belong to."""
        raise NotImplementedError

    def _symbolic(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the scaled loss, a tensor of the function being traced."""
        raise NotImplementedError

    def _unscaled_by_verb(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns what `get_unscaled_gradients`, maybe that of a subclass, makes of gradients."""
        return list(self.get_unscaled_gradients(gradients))

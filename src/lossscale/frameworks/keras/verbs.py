"""The documented calls of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.frameworks.common.autograph import as_written
from lossscale.frameworks.keras.parts import Parts
from lossscale.frameworks.keras.step import of_the_loss


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
        place = self._backend.current_place()
        with self._handover.aside(place):
            gradients, variables = self._backend.differentiate(
                loss, var_list, self.get_scaled_loss, tape=tape, grad_loss=grad_loss
            )
            unscaled = self._unscaled_by_verb(gradients, variables)
            return self._apply_unscaled(place, unscaled, variables, name)

    def _unscaled_by_verb(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        multiplied = of_the_loss(gradients, variables)
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
        self._handover.note_all_unscaled(place)
        named: dict[str, Any] = {} if name is None else {"name": name}
        return self.apply_gradients(list(zip(gradients, variables, strict=True)), **named)

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
        self._handover.note_unscaled(self._backend.current_place(), _number(gradients))
        scale = self._current_scale()
        return list(self._backend.unscaled(gradients, scale, self._rule.powers_of_two))

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        place = self._backend.current_place()
        params = self._backend.flat_variables(params)
        with self._handover.aside(place):
            gradients = self._gradients_of(loss, params)
        self._handover.note_unscaled(place, len(gradients))
        return gradients

    def _gradients_of(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        if callable(loss):
            gradients, _ = self._backend.differentiate(loss, params, self.get_scaled_loss)
        else:
            gradients = self._backend.symbolic_gradients(self.get_scaled_loss(loss), params)
        for gradient, variable in zip(gradients, params, strict=True):
            if gradient is None:
                raise GradientsError(
                    f"The loss has no gradient with respect to {variable.name!r}: it does not "
                    "depend on it, or an operation between them has no gradient. Leave the "
                    "variable out of `params`."
                )
        return self._unscaled_by_verb(gradients, params)

    def get_updates(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        place = self._backend.current_place()
        with self._handover.aside(place):
            gradients = self.get_gradients(loss, params)
            variables = self._backend.flat_variables(params)
            return [self._apply_unscaled(place, gradients, variables, None)]


def _number(gradients: Sequence[Any]) -> int:
    return sum(gradient is not None for gradient in gradients)

"""The documented calls of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lossscale.keras.parts import Parts
from lossscale.keras.step import of_the_loss
from lossscale.keras_common.verbs import SharedVerbs


class DocumentedVerbs(SharedVerbs, Parts):
    """`minimize`, and how gradients are computed."""

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
            gradients, variables = self._differentiated(loss, var_list, grad_loss, tape)
            unscaled = self._unscaled_by_verb(gradients, variables)
            pairs = list(zip(unscaled, variables, strict=True))
            return self._apply_unscaled(place, pairs, name)

    def _unscaled_by_verb(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        multiplied = of_the_loss(gradients, variables)
        return [
            given if kept is None else unscaled
            for given, kept, unscaled in zip(
                gradients, multiplied, self.get_unscaled_gradients(multiplied), strict=True
            )
        ]

    def _differentiated(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> tuple[list[Any], list[Any]]:
        return self._backend.differentiate(
            loss, var_list, self.get_scaled_loss, tape=tape, grad_loss=grad_loss
        )

    def _symbolic(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        return self._backend.symbolic_gradients(self.get_scaled_loss(loss), params)

"""What every training step does around the arithmetic, in both generations of Keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lossscale.common.autograph import as_written
from lossscale.common.checks import checked_pairs, with_gradient
from lossscale.common.notes import NotesOfVariables
from lossscale.keras_common.parts import SharedParts


class SharedTraining(SharedParts):
    """`apply_gradients`, the scale, and the notes of a monitor."""

    @as_written
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        gradients, variables = checked_pairs(grads_and_vars, self._backend.is_variable)
        self._check_context()
        moved = with_gradient(gradients, variables)
        place = self._backend.current_place()
        scaled = self._handover.are_scaled(place, moved)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        done = self._apply_step(gradients, variables, name, scaled=scaled, aggregate=aggregate)
        self._handover.note_applied(place, moved)
        return done

    def _scaled(self, loss: Any) -> Any:
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._backend.scaled(loss, self._current_scale())

    # What a LossScale object of the older API replaces.

    def _current_scale(self) -> Any:
        # A loss scale that moves by itself has a method of its own in this place.
        assert self._state is not None
        return self._rule.loss_scale(self._state.read())

    def _keep_notes(self, histograms_every: int | None) -> None:
        """Lets steps note what a monitor reads; takes effect in functions that are traced later.

        Args:
            histograms_every: At which multiples of this step number exponents are counted; None
                for never.
        """
        # Past the attribute tracking of Keras and TensorFlow.
        self.__dict__["_notes"] = self._new_notes(histograms_every)

    # What differs.

    def _check_context(self) -> None:
        """Raises where no step can be taken."""

    def _apply_step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        name: str | None,
        *,
        scaled: bool,
        aggregate: bool,
    ) -> Any:
        """Takes a step, and returns what `apply_gradients` does."""
        raise NotImplementedError

    def _new_notes(self, histograms_every: int | None) -> NotesOfVariables:
        """Returns what notes steps for a monitor."""
        raise NotImplementedError

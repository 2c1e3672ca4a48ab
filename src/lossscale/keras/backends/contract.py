"""What loss scaling needs of a backend of Keras, as a type: each backend is a module with these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lossscale.common.handover import Place
from lossscale.common.notes import NotesOfVariables, StepNotes
from lossscale.keras.state import Ledger
from lossscale.keras.step import Step


class Backend(Protocol):
    """A backend of Keras."""

    @property
    def namespace(self) -> Any:
        """The array functions for `ScaleRule.update`."""

    def check_strategy(self) -> None:
        """Raises under a distribution where loss scaling does not work."""

    def current_place(self) -> Place:
        """The function being traced, and the replica."""

    def replica_count(self) -> int:
        """How many replicas train together."""

    def outside_traces(self) -> contextlib.AbstractContextManager[None]:
        """Within it variables are set now and once, also where a function is being traced."""

    # Variables.

    def is_variable(self, value: Any) -> bool:
        """Whether a gradient can be applied to it."""

    def flat_variables(self, variables: Any) -> list[Any]:
        """Returns a list of variables from one variable or a nest of them."""

    def read(self, variable: Any) -> Any:
        """The value of a Keras variable now, as a tensor that does not change with it."""

    def aggregation_name(self, aggregation: Any) -> str:
        """Returns Keras' name of an aggregation over replicas."""

    # Arrays.

    def scaled(self, loss: Any, scale: Any) -> Any:
        """Multiplies a loss by the scale, in float32 or wider."""

    def unscaled(self, gradients: Sequence[Any], scale: Any, powers_of_two: bool) -> list[Any]:
        """Divides gradients by the scale, in float32 or wider; sparse stays sparse."""

    def all_finite(self, gradients: Sequence[Any], scale: Any = None) -> Any:
        """Whether gradients are finite once they are unscaled, a boolean scalar tensor."""

    def flat_gradients(self, gradients: Any) -> list[Any]:
        """The gradients in a nest, without None."""

    def cast(self, gradient: Any, dtype: str) -> Any:
        """Returns a gradient, dense or sparse, in another dtype."""

    def known(self, verdict: Any) -> bool | None:
        """A verdict as a bool where it is known before the step runs, else None."""

    # Gradients and steps.

    def differentiate(
        self,
        loss: Any,
        variables: Any,
        scale: Callable[[Any], Any],
        *,
        tape: Any = None,
        grad_loss: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of a scaled loss, and the variables they belong to."""

    def symbolic_gradients(self, loss: Any, variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients of a tensor of the function that is being traced."""

    def run_step(self, step: Step, inner: Any, ledger: Ledger, notes: StepNotes | None) -> None:
        """Unscales and checks gradients, applies or skips the step, moves the scale."""

    def new_notes(
        self, histograms_every: int | None, new_variable: Callable[..., Any]
    ) -> NotesOfVariables:
        """Returns what notes steps for a monitor."""

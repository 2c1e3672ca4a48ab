"""Whether the gradients that `apply_gradients` receives are still scaled.

Two families of calls meet there. The documented one gives it unscaled gradients:
`get_scaled_loss`, `get_unscaled_gradients`, `apply_gradients`. Keras' trainer gives it scaled
ones: `scale_loss`, `apply_gradients`. So `scale_loss` leaves a mark, and the next
`apply_gradients` (or `get_unscaled_gradients`) takes it away.

Under `tf.function` these calls run once, when the function is traced, and not on later steps.
A mark that was made in one graph and found in another therefore stays: the traced half will
scale the loss again on the next step without passing through here.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple

from lossscale.errors import LossScaleWarning

_NOTHING_SCALED = (
    "apply_gradients() was called, and the loss was never scaled. The gradients are applied as "
    "they are, which is correct for float32; float16 gradients may have flushed to zero before. "
    "Scale the loss with get_scaled_loss() and unscale the gradients with "
    "get_unscaled_gradients(), or call minimize(), which does both."
)
_NOT_UNSCALED = (
    "get_scaled_loss() was called, and get_unscaled_gradients() was not, before "
    "apply_gradients(). The gradients are applied as they are: if nothing else divided them by "
    "the loss scale, this step is too large by that factor. Pass them through "
    "get_unscaled_gradients() first."
)
_APPLY_WITHOUT_SCALE = (
    "apply() divides the gradients by the loss scale, and the loss was never scaled with "
    "scale_loss(). If nothing else multiplied it by the loss scale, this step is too small by "
    "that factor. Pass the loss through scale_loss() before taking gradients, or give unscaled "
    "gradients to apply_gradients()."
)
_UNSCALED_TWICE = (
    "apply() divides the gradients by the loss scale, and get_unscaled_gradients() already did. "
    "If these are its gradients, this step is too small by that factor. Pass unscaled gradients "
    "to apply_gradients()."
)
_EITHER = (
    "apply_gradients() cannot tell whether these gradients are scaled: scale_loss() and "
    "get_unscaled_gradients() were both called inside a tf.function that returned gradients. They "
    "are taken for scaled ones and divided by the loss scale. Call apply_gradients() inside the "
    "tf.function, or use only one of the two."
)


class Place(NamedTuple):
    """Where in a program a call is made.

    Attributes:
        graph: The graph being traced, None where there is none.
        replicas: The numbers of the replicas it is made for.
    """

    graph: Any
    replicas: tuple[int, ...]


class GradientConvention:
    """Remembers how the loss was scaled, for the call that applies the gradients."""

    def __init__(self) -> None:
        # By the number of the replica, each of which scales a loss of its own. Not by thread:
        # TensorFlow's replicas get new threads on every run.
        self._marks: dict[int, tuple[str, weakref.ref[Any] | None]] = {}
        self._made_in_a_trace: set[str] = set()
        self._loss_was_scaled = False
        self._loss_was_scaled_by_hand = False
        self._gradients_were_unscaled = False
        self._warned: set[str] = set()

    def note_scale_loss(self, place: Place) -> None:
        """`scale_loss` was called."""
        self._loss_was_scaled = True
        self._mark("scaled", place)

    def note_get_scaled_loss(self) -> None:
        """`get_scaled_loss` was called."""
        self._loss_was_scaled_by_hand = True

    def note_get_unscaled_gradients(self, place: Place) -> None:
        """`get_unscaled_gradients` was called: what it returned is not scaled any more."""
        self._gradients_were_unscaled = True
        self._mark("unscaled", place)

    def take(self, place: Place) -> bool:
        """Returns whether the gradients given to `apply_gradients` are scaled; takes the mark."""
        mark = self._taken(place)
        if mark is not None:
            kind, made_in = mark
            if made_in is not None and made_in() is not place.graph:
                self._made_in_a_trace.add(kind)
            return kind == "scaled"
        if "scaled" in self._made_in_a_trace:
            if "unscaled" in self._made_in_a_trace:
                self._warn_once(_EITHER)
            return True
        if not self._gradients_were_unscaled:
            self._warn_once(_NOT_UNSCALED if self._loss_was_scaled_by_hand else _NOTHING_SCALED)
        return False

    def take_for_apply(self, place: Place) -> None:
        """Keras' `apply` was called, whose gradients are scaled by definition."""
        self._taken(place)
        if self._loss_was_scaled:
            return
        if self._gradients_were_unscaled:
            self._warn_once(_UNSCALED_TWICE)
        elif not self._loss_was_scaled_by_hand:
            self._warn_once(_APPLY_WITHOUT_SCALE)

    def _mark(self, kind: str, place: Place) -> None:
        graph = None if place.graph is None else weakref.ref(place.graph)
        self._marks.update(dict.fromkeys(place.replicas, (kind, graph)))

    def _taken(self, place: Place) -> tuple[str, weakref.ref[Any] | None] | None:
        marks = [self._marks.pop(replica, None) for replica in place.replicas]
        return marks[0]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, LossScaleWarning, stacklevel=4)

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

import threading
import warnings
import weakref
from typing import Any

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


class GradientConvention:
    """Remembers how the loss was scaled, for the call that applies the gradients."""

    def __init__(self) -> None:
        # Replicas of a TensorFlow strategy run in threads of their own, each with its own loss.
        self._local = threading.local()
        self._scaled_in_a_trace = False
        self._loss_was_scaled = False
        self._loss_was_scaled_by_hand = False
        self._gradients_were_unscaled = False
        self._warned: set[str] = set()

    def note_scale_loss(self, graph: Any) -> None:
        """`scale_loss` was called; `graph` is the graph being built, None in eager mode."""
        self._loss_was_scaled = True
        self._local.pending = "scaled"
        self._local.graph = None if graph is None else weakref.ref(graph)

    def note_get_scaled_loss(self) -> None:
        """`get_scaled_loss` was called."""
        self._loss_was_scaled_by_hand = True

    def note_get_unscaled_gradients(self) -> None:
        """`get_unscaled_gradients` was called: what it returned is not scaled any more."""
        self._gradients_were_unscaled = True
        self._local.pending = "unscaled"

    def take(self, graph: Any) -> bool:
        """Returns whether the gradients given to `apply_gradients` are scaled; takes the mark."""
        pending = getattr(self._local, "pending", None)
        self._local.pending = None
        if pending == "unscaled":
            return False
        if pending == "scaled":
            made_in = self._local.graph
            if made_in is not None and made_in() is not graph:
                self._scaled_in_a_trace = True
            return True
        if self._scaled_in_a_trace:
            return True
        if not self._gradients_were_unscaled:
            self._warn_once(_NOT_UNSCALED if self._loss_was_scaled_by_hand else _NOTHING_SCALED)
        return False

    def take_for_apply(self) -> None:
        """Keras' `apply` was called, whose gradients are scaled by definition."""
        self._local.pending = None
        if not (self._loss_was_scaled or self._loss_was_scaled_by_hand):
            self._warn_once(_APPLY_WITHOUT_SCALE)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, LossScaleWarning, stacklevel=4)

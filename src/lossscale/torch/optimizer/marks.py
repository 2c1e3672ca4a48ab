"""What is known of the gradients between the loss that was scaled and the step."""

from __future__ import annotations

import weakref
from typing import Any

NOTHING = "nothing"
"""No loss was scaled since the last step."""

SCALED = "scaled"
"""A loss was scaled: the gradients are those of the scaled loss."""

SCALED_BY_HAND = "scaled by hand"
"""`get_scaled_loss` has scaled one: `apply_gradients` expects what was unscaled by hand too."""

UNSCALED = "unscaled"
"""`get_unscaled_gradients` has divided them, and nobody has looked at them."""

JUDGED = "judged"
"""They were divided and looked at, where they are."""


class Marks:
    """A plain object, because compiled code loses what it writes to an optimizer.

    Attributes:
        stage: One of the constants above.
        verdict: What was found, if they were judged.
        divided: What `get_unscaled_gradients` was given, and the version of each tensor.
        clips: Whether they still have to be clipped.
        warned: Whether a step without a scaled loss was warned of.
    """

    def __init__(self) -> None:
        self.warned = False
        self._scaled: Any = None
        self.reset()

    def remember(self, scaled: Any) -> None:
        """A loss was scaled; this is what came of it."""
        self._scaled = weakref.ref(scaled)

    def was_scaled(self, loss: Any) -> bool:
        """Whether this very tensor is what came of the last loss that was scaled."""
        return self._scaled is not None and loss is not None and self._scaled() is loss

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scaled": None}

    def reset(self) -> None:
        """A step was made."""
        self.stage = NOTHING
        self.verdict: Any = None
        self.clips = False
        self.divided: list[tuple[Any, int]] = []

"""What is known of the gradients between the loss that was scaled and the step."""

from __future__ import annotations

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
        self.reset()

    def reset(self) -> None:
        """A step was made."""
        self.stage = NOTHING
        self.verdict: Any = None
        self.clips = False
        self.divided: list[tuple[Any, int]] = []

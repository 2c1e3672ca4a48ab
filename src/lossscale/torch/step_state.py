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
"""`get_unscaled_gradients` has divided them, and nobody has checked them."""

CHECKED = "checked"
"""They were unscaled and checked, where they are."""

_MARK = "_is_scaled_by_lossscale"


def remember_scaled(loss: Any) -> None:
    """Marks a tensor that came of scaling, by any optimizer."""
    setattr(loss, _MARK, True)


def was_scaled(loss: Any) -> bool:
    """Whether this very tensor came of scaling."""
    return hasattr(loss, _MARK)


class StepState:
    """A plain object, because compiled code loses what it writes to an optimizer.

    Attributes:
        stage: One of the constants above.
        decision: What was decided, if they were checked.
        unscaled_before: The gradients that were unscaled before a loss was scaled, their versions
            by their ids.
        decision_before: What was decided on these.
        divided: What `get_unscaled_gradients` was given, and the version of each tensor.
        clips: Whether they still have to be clipped.
        is_settled: Whether `zero_grad` came in the place of the step that was decided on.
        warned: Whether a step without a scaled loss was warned of.
    """

    def __init__(self) -> None:
        self.warned = False
        self.reset()

    def reset(self) -> None:
        """A step was made."""
        self.stage = NOTHING
        self.decision: Any = None
        self.clips = self.is_settled = False
        self.unscaled_before: dict[int, int] = {}
        self.decision_before: Any = None
        self.divided: list[tuple[Any, int]] = []

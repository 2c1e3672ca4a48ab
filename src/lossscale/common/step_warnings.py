"""Warnings of a step: its gradients may be scaled still; it is skipped at the minimum scale."""

from __future__ import annotations

from lossscale.packages import warn
from lossscale.rules import DynamicScale, ScaleRule

NOT_UNSCALED = (
    "get_scaled_loss() was called, and get_unscaled_gradients() was not, before "
    "apply_gradients(). The gradients are applied as they are: if nothing else divided them by "
    "the loss scale, this step is too large by that factor. Pass them through "
    "get_unscaled_gradients() first."
)
"""The warning of an `apply_gradients` whose gradients may still be scaled."""
_USEFUL_FLOOR = 2.0**-24


def warned_at_floor(
    rule: ScaleRule, scale: float, write: str = "DynamicScale(min_scale=2.0**-24)"
) -> bool:
    """Warns if a step was skipped at the minimum scale.

    Args:
        rule: The rule.
        scale: The loss scale of the step.
        write: The code that sets a lower minimum.

    Returns:
        Whether it warned.
    """
    if not isinstance(rule, DynamicScale) or scale > rule.min_scale:
        return False
    lower = f" If gradients are too large for float16, use {write}."
    warn(
        f"A step was skipped at the minimum loss scale, {scale:g}: a gradient is not finite, and "
        "the scale cannot fall further. If the loss itself is not finite, no scale helps: leave "
        "such batches out, or use DynamicScale(overflows_before_backoff=2)."
        f"{lower if scale > _USEFUL_FLOOR else ''} explain() names the operation that fails, a "
        "monitor the gradients, and diagnose() says whether another scale helps."
    )
    return True

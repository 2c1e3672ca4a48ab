"""The warning of a step that is skipped at the minimum scale."""

from __future__ import annotations

from lossscale.monitoring.record import advice_at_floor
from lossscale.packages import warn
from lossscale.rules import DynamicScale, ScaleRule


def warned_at_floor(rule: ScaleRule, scale: float, *, takes_rules: bool = True) -> bool:
    """Warns if a step was skipped at the minimum scale.

    Args:
        rule: The rule.
        scale: The loss scale of the step.
        takes_rules: Whether a rule can be passed, as to all but a gradient scaler.

    Returns:
        Whether it warned.
    """
    if not isinstance(rule, DynamicScale) or scale > rule.min_scale:
        return False
    warn(
        f"A step was skipped at the minimum loss scale, {scale:g}: a gradient is not finite, and "
        f"the scale cannot fall further. {advice_at_floor(scale, takes_rules=takes_rules)} "
        "explain() names the operation that fails, a monitor the gradients, and diagnose() says "
        "whether another scale helps."
    )
    return True

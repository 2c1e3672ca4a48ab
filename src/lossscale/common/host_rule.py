"""Moves a loss scale on the host: a few Python numbers instead of some twenty small operations.

That pays where each operation is started by the host, and the host knows the verdict anyway.
"""

from __future__ import annotations

from typing import Any

from lossscale.rules import Needs, ScaleRule, ScaleState, Seen


def host_can_move(rule: ScaleRule) -> bool:
    """Whether `changes` gives what the rule gives on tensors."""
    # What else a rule needs to see would have to be waited for.
    return rule.moves_on_host and rule.needs == Needs()


class _Numbers:
    """The one function of a namespace that rules need, for Python numbers."""

    @staticmethod
    def where(condition: bool, one: Any, other: Any) -> Any:
        return one if condition else other


def changes(rule: ScaleRule, before: ScaleState, applied: bool) -> dict[str, Any]:
    """Returns the fields of a state that a step changes, with their new values.

    Args:
        rule: One that `host_can_move`.
        before: The state before the step, as Python numbers.
        applied: Whether the step was applied.
    """
    after = rule.update(before, Seen(applied), xp=_Numbers)
    # A NaN is unequal to itself, and written again.
    return {
        field: new
        for field, old, new in zip(before._fields, before, after, strict=True)
        if new != old
    }

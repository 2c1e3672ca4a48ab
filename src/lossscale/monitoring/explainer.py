"""Explains a number of the steps of a run, and warns of those that no loss scale mends."""

from __future__ import annotations

from collections.abc import Callable

from lossscale.errors import first_line
from lossscale.monitoring.explanation import Cause, Explanation, Facts, explained, is_broken
from lossscale.monitoring.record import is_lowest
from lossscale.monitoring.recorder import StepStats
from lossscale.packages import warn
from lossscale.rules import ScaleRule

_SINGLE_SKIPS = 5
"""Single skips because of the scale that count as explained steps."""


class Explainer:
    """Explains a number of steps: skipped ones, and those whose loss is not finite.

    Args:
        left: The number of steps.
        rule: The rule of the loss scale.

    Attributes:
        left: The number of steps that it may still explain.
        last: The last explanation, or None.
    """

    def __init__(self, left: int, rule: ScaleRule) -> None:
        self.left = left
        self.last: Explanation | None = None
        self._rule, self._single, self._last_step = rule, _SINGLE_SKIPS, -1
        self._warned: set[str] = set()

    def wants(self, loss: float | None, *, skipped: bool) -> bool:
        """Whether a step is to be explained; its loss may not be known."""
        return self.left > 0 and (skipped or is_broken(loss))

    def write(self, step: int, facts: Facts, *, skipped: bool) -> Explanation:
        """Writes the explanation of a step, and warns, once for each place, if it is a fault."""
        facts = facts._replace(is_lowest=is_lowest(self._rule, facts.scale))
        self.last = found = explained(facts)
        is_single, self._last_step = self._last_step != step - 1, step
        is_scaled = found.cause is Cause.SCALE
        if not is_scaled or not is_single or self._single:
            self._single -= is_scaled and self._single > 0
            self.left -= 1
        key = f"{found.cause} {found.operation} {found.module}"
        # If the loss is finite, it may be the scale.
        is_unsure = found.cause is Cause.LOSS and not (facts.loss is None or is_broken(facts.loss))
        is_fault = found.cause not in (Cause.SCALE, Cause.UNKNOWN) and not is_unsure
        if is_fault and key not in self._warned:
            self._warned.add(key)
            event = "skipped" if skipped else f"applied, and its loss is {facts.loss:g}"
            warn(f"Step {step} was {event}. {found.text}")
        return found

    def explain(self, stats: StepStats, facts_of: Callable[[], Facts]) -> StepStats:
        """Explains the last step, if it is to be, by a pass that includes the loss.

        Args:
            stats: The statistics, with the loss if it is known.
            facts_of: Repeats the pass, with the weights after the step.
        """
        loss, skipped = stats.loss, stats.skipped
        if not self.wants(loss, skipped=skipped):
            return stats
        try:
            facts = facts_of()
        # A program may raise anything, and training has to continue.
        except Exception as error:
            line = f"{type(error).__name__}: {first_line(error, 200)}"
            facts = Facts(why_not=f"the pass cannot be repeated ({line})")
        if facts._replace(loss=loss).is_loss_broken:
            later = " with the weights after the step" if not skipped else ""
            facts = Facts(why_not=f"the loss was {loss:g}, and is finite when repeated{later}")
        facts = facts._replace(loss=loss, scale=stats.scale, is_later=not skipped)
        return stats._replace(explanation=self.write(stats.step, facts, skipped=skipped))

"""The records that monitors make of training steps, and explanations."""

from lossscale.monitoring.explanation import Cause, Explanation
from lossscale.monitoring.record import NonfiniteTensor, SkipReason, StepRecord

__all__ = ["Cause", "Explanation", "NonfiniteTensor", "SkipReason", "StepRecord"]

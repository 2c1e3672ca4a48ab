"""What a run's loss scale does: a record of each sampled step, a file of them, and two alarms."""

from lossscale.monitoring.monitor import Monitor, MonitorSettings, StepStats
from lossscale.monitoring.record import NonfiniteTensor, SkipReason, StepRecord, read_records

__all__ = [
    "Monitor",
    "MonitorSettings",
    "NonfiniteTensor",
    "SkipReason",
    "StepRecord",
    "StepStats",
    "read_records",
]


def __dir__() -> list[str]:
    # What is public, for completion.
    return sorted(__all__)

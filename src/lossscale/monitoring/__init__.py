"""What a run's loss scale does, written down and watched: records, histories, alarms."""

from lossscale.monitoring.alarms import Alarm, AlarmKind, Alarms
from lossscale.monitoring.history import HistoryHeader, HistoryWriter, TrainingHistory
from lossscale.monitoring.monitor import Monitor, StepStats
from lossscale.monitoring.record import NonfiniteTensor, SkipReason, StepRecord
from lossscale.monitoring.settings import MonitorSettings
from lossscale.monitoring.simulation import (
    Simulation,
    critical_probability,
    expected_drift,
    simulate,
    simulate_gradients,
    simulate_random,
)

__all__ = [
    "Alarm",
    "AlarmKind",
    "Alarms",
    "HistoryHeader",
    "HistoryWriter",
    "Monitor",
    "MonitorSettings",
    "NonfiniteTensor",
    "Simulation",
    "SkipReason",
    "StepRecord",
    "StepStats",
    "TrainingHistory",
    "critical_probability",
    "expected_drift",
    "simulate",
    "simulate_gradients",
    "simulate_random",
]


def __dir__() -> list[str]:
    # What is public, for completion.
    return sorted(__all__)

"""What a run's loss scale does, written down and watched: records, histories, alarms."""

from lossscale.monitoring.alarms import Alarm as Alarm
from lossscale.monitoring.alarms import AlarmKind as AlarmKind
from lossscale.monitoring.alarms import Alarms as Alarms
from lossscale.monitoring.history import HistoryHeader as HistoryHeader
from lossscale.monitoring.history import HistoryWriter as HistoryWriter
from lossscale.monitoring.history import TrainingHistory as TrainingHistory
from lossscale.monitoring.monitor import Monitor as Monitor
from lossscale.monitoring.monitor import StepStats as StepStats
from lossscale.monitoring.record import NonfiniteTensor as NonfiniteTensor
from lossscale.monitoring.record import SkipReason as SkipReason
from lossscale.monitoring.record import StepRecord as StepRecord
from lossscale.monitoring.settings import MonitorSettings as MonitorSettings
from lossscale.monitoring.simulation import Simulation as Simulation
from lossscale.monitoring.simulation import critical_probability as critical_probability
from lossscale.monitoring.simulation import expected_drift as expected_drift
from lossscale.monitoring.simulation import simulate as simulate
from lossscale.monitoring.simulation import simulate_gradients as simulate_gradients
from lossscale.monitoring.simulation import simulate_random as simulate_random

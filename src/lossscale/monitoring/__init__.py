"""The records that monitors make of training steps, and the reader of their files."""

from lossscale.monitoring.record import NonfiniteTensor, SkipReason, StepRecord, read_records

__all__ = ["NonfiniteTensor", "SkipReason", "StepRecord", "read_records"]

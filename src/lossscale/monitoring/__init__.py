"""The records that monitors make of training steps, and explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lossscale import registry
from lossscale.monitoring.record import NonfiniteTensor, SkipReason, StepRecord

__all__ = ["Cause", "Explanation", "NonfiniteTensor", "SkipReason", "StepRecord"]

if TYPE_CHECKING:
    from lossscale.explain.text import Cause as Cause
    from lossscale.explain.text import Explanation as Explanation
else:
    # A monitor records, and explains nothing.
    _module = "lossscale.explain.text"
    __getattr__ = registry.imported_late(__name__, Cause=_module, Explanation=_module)


def __dir__() -> list[str]:
    # Public names, for completion.
    return sorted(__all__)

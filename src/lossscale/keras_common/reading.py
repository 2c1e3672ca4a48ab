"""What can be read from an optimizer, as far as the generations of Keras share it."""

from __future__ import annotations

from typing import Any

from lossscale.arguments import config_from_rule
from lossscale.keras_common.parts import SharedParts


class SharedReading(SharedParts):
    """`steps_skipped`, `last_step_skipped`, and the rule in a configuration."""

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__
        return f"<LossScaleOptimizer {self.name!r} around {inner}, {self._rule}>"

    @property
    def steps_skipped(self) -> Any:
        return self._backend.read(self._steps_skipped)

    @property
    def last_step_skipped(self) -> Any:
        return self._backend.read(self._last_step_skipped)

    def _described_rule(self) -> dict[str, Any]:
        described = config_from_rule(self._rule)
        if "rule" in described:
            described["rule"]["class_name"] = self._registered_name(type(self._rule))
        return described

"""The columns: the ways to apply gradients that are compared. A new way is a new entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

SCALE = 2.0**15
# No scale grows while it is timed: growth is one step in thousands, and not what is measured.
NEVER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to apply gradients.

    Args:
        title: The heading of its column.
        meaning: What it does, for the documentation.
        wrapped: Returns the optimizer, given a function that makes the inner one, the loss scale
            and the package, `keras` or `tf_keras`. None stands for the inner optimizer alone.
        scaled: Whether it receives gradients of the scaled loss.
        exact: Whether its weights must be those of the bare optimizer, bit for bit.
        reads: Whether a sum of every gradient is taken beside the inner optimizer.
        unscales: Whether every gradient is multiplied by the reciprocal of the scale first.
    """

    title: str
    meaning: str
    wrapped: Callable[[Callable[..., Any], float, Any], Any] | None = None
    scaled: bool = True
    exact: bool = False
    reads: bool = False
    unscales: bool = False

    def optimizer(self, new_inner: Callable[..., Any], scale: float, package: Any) -> Any:
        """Returns a new optimizer."""
        return new_inner() if self.wrapped is None else self.wrapped(new_inner, scale, package)


def _ours_dynamic(new_inner: Callable[..., Any], scale: float, package: Any) -> Any:
    import lossscale

    rule = lossscale.DynamicScale(initial_scale=scale, growth_interval=NEVER)
    return lossscale.LossScaleOptimizer(new_inner(), rule=rule)


def _ours_fixed(new_inner: Callable[..., Any], scale: float, package: Any) -> Any:
    import lossscale

    return lossscale.LossScaleOptimizer(new_inner(), rule=lossscale.FixedScale(scale))


def _ours_monitored(new_inner: Callable[..., Any], scale: float, package: Any) -> Any:
    optimizer = _ours_dynamic(new_inner, scale, package)
    optimizer._keep_notes(None)
    return optimizer


def _peer_dynamic(new_inner: Callable[..., Any], scale: float, package: Any) -> Any:
    return package.mixed_precision.LossScaleOptimizer(
        new_inner(), initial_scale=scale, dynamic_growth_steps=NEVER
    )


def _peer_fixed(new_inner: Callable[..., Any], scale: float, package: Any) -> Any:
    if package.__name__ == "tf_keras":
        return package.mixed_precision.LossScaleOptimizer(
            new_inner(), dynamic=False, initial_scale=scale
        )
    return new_inner(loss_scale_factor=scale)


METHODS = {
    "bare": Method(
        "bare", "The inner optimizer alone, given gradients of the unscaled loss.", scaled=False
    ),
    "ours_dynamic": Method(
        "ours, dynamic",
        "`lossscale.LossScaleOptimizer` with a `DynamicScale`.",
        _ours_dynamic,
        exact=True,
    ),
    "ours_fixed": Method(
        "ours, fixed",
        "`lossscale.LossScaleOptimizer` with a `FixedScale`, which checks nothing.",
        _ours_fixed,
        exact=True,
    ),
    "ours_monitored": Method(
        "ours, monitored",
        "The same as ours, dynamic, in a step that notes what a `LossScaleMonitor` reads: its "
        "scale, and for a skipped step which gradients are not finite.",
        _ours_monitored,
        exact=True,
    ),
    "peer_dynamic": Method(
        "peer, dynamic",
        "`keras.optimizers.LossScaleOptimizer`; for tf_keras "
        "`tf_keras.mixed_precision.LossScaleOptimizer`.",
        _peer_dynamic,
    ),
    "peer_fixed": Method(
        "peer, fixed",
        "The inner optimizer's own `loss_scale_factor`; for tf_keras "
        "`tf_keras.mixed_precision.LossScaleOptimizer(..., dynamic=False)`.",
        _peer_fixed,
    ),
    "read": Method(
        "floor: read",
        "The inner optimizer, and a sum of every gradient that nothing depends on: what it costs "
        "to look at each gradient once.",
        scaled=False,
        exact=True,
        reads=True,
    ),
    "unscale": Method(
        "floor: unscale",
        "The inner optimizer, given each gradient times the reciprocal of a scale that a variable "
        "holds, without any check.",
        exact=True,
        unscales=True,
    ),
    "bare_again": Method(
        "bare, again",
        "The same as bare, built a second time: as far as it is from 1, a ratio is chance.",
        scaled=False,
        exact=True,
    ),
}

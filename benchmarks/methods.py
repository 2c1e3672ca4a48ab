"""The columns: the compared methods of a step. To add a method, add an entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import lossscale

SCALE = 2.0**15
# No scale grows while it is timed: growth happens once in thousands of steps.
NEVER = 2**31 - 1
SKIPPED = "/skipped"
"""The suffix of a method's name if each of its steps overflows."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to apply gradients with an optimizer of Keras 3 or tf_keras.

    Args:
        title: The heading of its column.
        wrapped: Returns the optimizer, given a function that creates the inner one and the package,
            `keras` or `tf_keras`. None means the inner optimizer alone.
        scaled: Whether it gets gradients of the scaled loss.
        exact: Whether its weights must equal those of the bare optimizer, bit for bit.
        reads: Whether it also sums every gradient.
        unscales: Whether it multiplies every gradient by the reciprocal of the scale first.
    """

    title: str
    wrapped: Callable[[Callable[..., Any], Any], Any] | None = None
    scaled: bool = True
    exact: bool = False
    reads: bool = False
    unscales: bool = False


def _ours_dynamic(new_inner: Callable[..., Any], package: Any) -> Any:
    rule = lossscale.DynamicScale(initial_scale=SCALE, growth_interval=NEVER)
    return lossscale.LossScaleOptimizer(new_inner(), rule=rule)


def _ours_fixed(new_inner: Callable[..., Any], package: Any) -> Any:
    return lossscale.LossScaleOptimizer(new_inner(), rule=lossscale.FixedScale(SCALE))


def _ours_monitored(new_inner: Callable[..., Any], package: Any) -> Any:
    optimizer = _ours_dynamic(new_inner, package)
    # A monitor does this when `fit` begins.
    optimizer._track_overflows()
    return optimizer


def _peer_dynamic(new_inner: Callable[..., Any], package: Any) -> Any:
    peer = package.mixed_precision.LossScaleOptimizer
    return peer(new_inner(), initial_scale=SCALE, dynamic_growth_steps=NEVER)


def _peer_fixed(new_inner: Callable[..., Any], package: Any) -> Any:
    if package.__name__ == "tf_keras":
        peer = package.mixed_precision.LossScaleOptimizer
        return peer(new_inner(), dynamic=False, initial_scale=SCALE)
    return new_inner(loss_scale_factor=SCALE)


# docs/internals/benchmarks.md says what each of them does.
METHODS = {
    "bare": Method("bare", scaled=False),
    "ours_dynamic": Method("ours, dynamic", _ours_dynamic, exact=True),
    "ours_fixed": Method("ours, fixed", _ours_fixed, exact=True),
    "ours_monitored": Method("ours, monitored", _ours_monitored, exact=True),
    "peer_dynamic": Method("peer, dynamic", _peer_dynamic),
    "peer_fixed": Method("peer, fixed", _peer_fixed),
    "read": Method("floor: read", scaled=False, exact=True, reads=True),
    "unscale": Method("floor: unscale", exact=True, unscales=True),
    "bare_again": Method("bare, again", scaled=False, exact=True),
}
OPTAX = ("bare", "read", "lossscale", "apply_if_finite", "jmp", "flax")
TORCH = (
    *("bare", "verb", "wrapper", "device", "fixed", "drop-in", "GradScaler"),
    *("bare, clip", "verb, clip", "wrapper, clip", "GradScaler, clip"),
    "masters",
)
"""`verb` is `optimizer.backward(loss)`, `wrapper` is `scale_loss(loss).backward()`, `masters`
`MasterWeights` of float16 parameters, without a loss scale."""
MONITORS: dict[str, dict[str, Any]] = {
    "no monitor": {},
    "every step": {"every": 1},
    "every 100 steps": {"every": 100},
}
"""The arguments of each monitor."""


def method(name: str) -> Method:
    """Returns the method with a name, which may have the suffix for overflowing steps."""
    return METHODS[name.removesuffix(SKIPPED)]

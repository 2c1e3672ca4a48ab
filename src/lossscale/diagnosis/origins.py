"""Where the infinities and NaN of a pass come from, by rules that no framework changes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lossscale.monitoring.explanation import (
    Cause,
    Explanation,
    FailedOperation,
    constant_beyond_float16,
    explained,
    infinity_in_the_loss,
    not_finite_argument,
    not_finite_weights,
    nothing_to_explain,
)

_HALVINGS = 24
"""The most halvings of the loss scale that are tried: 2**-24 is the smallest float16 number."""


class Origin(NamedTuple):
    """Where an infinity or a NaN comes from.

    Attributes:
        failed: The operation that made it of finite numbers; None if none did.
        name: The argument or parameter that contained it.
        is_weight: Whether `name` is a parameter.
        is_mask: Whether the program sets it itself, as in a mask.
    """

    failed: FailedOperation | None = None
    name: str = ""
    is_weight: bool = False
    is_mask: bool = False


class Flags(NamedTuple):
    """What an array contains that is not finite."""

    nan: bool = False
    infinity: bool = False


class Watched(NamedTuple):
    """The origins of what is not finite in a pass; None if all of it is finite."""

    loss: Origin | None
    gradients: Origin | None

    @property
    def is_finite(self) -> bool:
        """Whether everything is finite."""
        return self.loss is None and self.gradients is None


def passed_on(
    taken: Sequence[tuple[Origin, Flags]], made: Flags, *, sets: bool, in_backward: bool
) -> Origin | None:
    """Returns the origin of what an operation only passes on; None if it makes something new.

    Args:
        taken: The inputs that are not finite.
        made: What the result contains.
        sets: Whether the program gives the operation an infinity.
        in_backward: Whether it is an operation of the backward pass.
    """
    real = [origin for origin, _ in taken if not origin.is_mask]
    if real:
        # What was not finite before the pass came first.
        return next((origin for origin in real if origin.failed is None), real[0])
    if sets:
        return Origin(is_mask=True)
    if taken and not in_backward and (not made.nan or any(flags.nan for _, flags in taken)):
        return taken[0][0]
    return None


def explain_pass(
    watch: Callable[[float], Watched], scale: float, in_float32: Callable[[], Explanation]
) -> Explanation:
    """Returns why a pass is not finite.

    Args:
        watch: Computes the pass at a loss scale, and watches it.
        scale: The loss scale.
        in_float32: Explains the same pass in float32.
    """
    found = watch(scale)
    origin = found.loss or found.gradients
    if origin is None:
        return nothing_to_explain(scale)
    if origin.is_mask or (origin.failed is not None and origin.failed.of_infinities):
        narrow = _of_forward(origin)
        is_finite = narrow.in_float16 and in_float32().cause is Cause.UNKNOWN
        return constant_beyond_float16(narrow) if is_finite else narrow
    if found.loss is not None or origin.failed is None:
        return _of_forward(origin)

    def is_finite_after(halvings: int) -> bool:
        return watch(scale * 2.0**-halvings).is_finite

    halvings = None
    lowest = watch(scale * 2.0**-_HALVINGS)
    if lowest.is_finite:
        tried = range(1, _HALVINGS + 1)
        halvings = tried[bisect.bisect_left(tried, True, key=is_finite_after)]
    elif lowest.gradients is not None and lowest.gradients.failed is not None:
        # What overflows at this scale may come before what is not finite at any.
        origin = lowest.gradients
    assert origin.failed is not None
    failed = origin.failed._replace(in_backward=True)
    return explained(failed, scale=scale, halvings=halvings)


def _of_forward(origin: Origin) -> Explanation:
    if origin.failed is not None:
        return explained(origin.failed)
    if origin.is_mask:
        return infinity_in_the_loss("")
    return (not_finite_weights if origin.is_weight else not_finite_argument)(origin.name)

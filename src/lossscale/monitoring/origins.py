"""Origins of the infinities and NaN of a pass, by rules that hold in every framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lossscale.monitoring.explanation import (
    Explanation,
    Origin,
    constant_beyond_float16,
    explained,
    halvings_until,
    most_halvings,
    nothing_to_explain,
    of_forward_pass,
    with_hidden,
    with_line,
)

_HARM = 2.0**-10
"""Float16's rounding of 1."""


class Flags(NamedTuple):
    """The kinds of non-finite numbers in an array."""

    nan: bool = False
    infinity: bool = False


class Watched(NamedTuple):
    """The origins of what is not finite in a pass; None if all of it is finite.

    Attributes:
        loss: Of the loss.
        gradients: Of the first gradient.
        hidden: Of the first overflow that makes a result wrong, and finite.
        small: Numbers that are added, and that float16 rounds to few digits or to 0, by module.
    """

    loss: Origin | None
    gradients: Origin | None
    hidden: Origin | None = None
    small: Mapping[str, float] = {}

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
        made: The kinds of numbers in the result.
        sets: Whether the program gives the operation an infinity.
        in_backward: Whether it is an operation of the backward pass.
    """
    real = [origin for origin, _ in taken if not origin.is_mask]
    if real:
        # A skipped step may have left NaN in statistics, which a norm takes but does not read.
        return next((origin for origin in real if origin.failed is not None), real[0])
    if sets:
        return Origin(is_mask=True)
    if taken and not in_backward and (not made.nan or any(flags.nan for _, flags in taken)):
        return taken[0][0]
    return None


def overflow_in(taken: Sequence[tuple[Origin, Flags]]) -> Origin | None:
    """Returns the origin of an infinity that an operation of the forward pass has made."""
    return next((o for o, flags in taken if o.failed and flags.infinity and not flags.nan), None)


def is_harmed(difference: float, largest: float) -> bool:
    """Whether a finite result that an operation computes from an overflow is wrong.

    That of a division by a norm that overflows is, and the tanh of an overflow is not.

    Args:
        difference: The largest difference from what it computes from 65,504.
        largest: The largest magnitude of the latter.

    Examples:
        >>> is_harmed(1.5e-5, 1.5e-5), is_harmed(1.5e-5, 1.0)
        (True, False)
    """
    return difference > _HARM * min(largest, 1.0)


def explain_pass(
    watch: Callable[[float], Watched],
    scale: float,
    in_float32: Callable[[float], Watched] | None = None,
) -> Explanation:
    """Returns why a pass is not finite.

    Args:
        watch: Computes the pass at a loss scale, and watches it.
        scale: The loss scale.
        in_float32: Does the same in float32; None if the program cannot set a number above the
            largest float16 number, and the watch knows the small numbers.
    """

    @functools.cache
    def after(halvings: int) -> Watched:
        return watch(scale * 2.0**-halvings)

    @functools.cache
    def wide() -> Watched:
        # If there is nothing to compare with, all of it counts as not finite.
        return Watched(Origin(), None) if in_float32 is None else in_float32(scale)

    def with_epsilon(origin: Origin) -> Origin:
        if origin.failed is None or origin.failed.epsilon:
            return origin
        epsilon = wide().small.get(origin.failed.module, 0.0)
        return origin._replace(failed=origin.failed._replace(epsilon=epsilon))

    found = after(0)
    # Without the first two, nothing is skipped. What is hidden makes the step wrong.
    origin = found.loss or found.gradients or found.hidden
    if origin is None:
        return nothing_to_explain(scale)
    if origin.is_mask or (origin.failed is not None and origin.failed.of_infinities):
        narrow = of_forward_pass(with_epsilon(origin))
        is_beyond = narrow.in_float16 and wide().is_finite and wide().hidden is None
        return constant_beyond_float16(narrow) if is_beyond else narrow
    if found.loss is not None or origin.failed is None or not origin.failed.in_backward:
        return of_forward_pass(with_epsilon(origin))
    halvings = halvings_until(lambda halvings: after(halvings).is_finite, scale)
    lowest = after(most_halvings(scale)).gradients
    if lowest is not None and lowest.failed is not None:
        # An operation that overflows at this scale may precede one that fails at every scale.
        origin = lowest
    origin = with_epsilon(origin) if halvings is None else origin
    assert origin.failed is not None
    cause = with_hidden(explained(origin.failed, scale=scale, halvings=halvings), found.hidden)
    return with_line(cause, origin)

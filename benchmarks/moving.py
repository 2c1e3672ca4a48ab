"""A rule moved step by step under NumPy, in the dtypes that the frameworks' wrappers keep."""

from __future__ import annotations

from typing import Any

from lossscale.rules import GradientStats, ScaleRule, ScaleState


def first_state(rule: ScaleRule, shape: tuple[int, ...] = ()) -> ScaleState:
    """Returns a rule's first state as arrays.

    Args:
        rule: The rule.
        shape: The shape of each array. Each element is the state of a run of its own.

    Examples:
        >>> from lossscale.rules import DynamicScale
        >>> first_state(DynamicScale(initial_scale=8), (2,)).scale.tolist()
        [8.0, 8.0]
    """
    import numpy as np

    state = rule.init()
    return type(state)(*(np.full(shape, value, _dtype(value)) for value in state))


def next_state(rule: ScaleRule, state: ScaleState, stats: GradientStats) -> ScaleState:
    """Returns the state after a step, with the shape and the dtypes of the one before.

    Args:
        rule: The rule.
        state: Arrays, as `first_state` makes them.
        stats: What was stats of the gradients, arrays of the same shape.
    """
    import numpy as np

    after = rule.update(state, stats, xp=np)
    fields = zip(after, state, strict=True)
    return type(state)(*(np.asarray(new, old.dtype) for new, old in fields))


def _dtype(value: Any) -> Any:
    import numpy as np

    if isinstance(value, bool):
        return np.bool_
    return np.int64 if isinstance(value, int) else np.float32


def overflowing(rule: ScaleRule) -> GradientStats:
    """Returns what a rule sees of a step that overflows, and nothing else is known of.

    Args:
        rule: The rule.
    """
    import numpy as np

    needs, one = rule.needs, np.float32(1)
    return GradientStats(np.False_, np.float32(np.inf), (one,) * len(needs.counts_from), one)

"""The dynamic rule once more, in plain Python: what every array library is compared with."""

import math
import struct


def float32(value):
    """Returns the float32 number nearest to `value`, as a Python float."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def next_state(scale, streak, finite, *, interval, growth, backoff, lowest, highest):
    """Returns (scale, streak) after a step; `streak` is the number of finite steps in a row."""
    if not finite:
        # The order of `max` makes the lowest of NaN.
        return min(max(float32(lowest), float32(scale * float32(backoff))), float32(highest)), 0
    if streak + 1 < interval:
        return scale, streak + 1
    doubled = float32(scale * float32(growth))
    return (scale if doubled > float32(highest) else doubled), 0


def settings_of(rule):
    """What `next_state` is told of a `DynamicScale`, of which only the arguments are read."""
    return {
        "interval": rule.growth_interval,
        "growth": rule.growth_factor,
        "backoff": rule.backoff_factor,
        "lowest": rule.min_scale,
        "highest": 2.0**126 if rule.max_scale is None else rule.max_scale,
    }


def trace(rule, finite_steps, *, streak=0):
    """Returns the list of (scale, streak) after each step; `streak` is the count at the start."""
    settings = settings_of(rule)
    state, states, overflows = (float32(rule.initial_scale), streak), [], 0
    for finite in finite_steps:
        overflows = 0 if finite else overflows + 1
        if 0 < overflows < rule.overflows_before_backoff:
            state = (state[0], 0)
        else:
            state = next_state(*state, finite, **settings)
        states.append(state)
    return states

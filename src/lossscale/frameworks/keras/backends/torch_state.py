"""PyTorch: the loss scale's state, read and moved by the host.

The host has to wait once for the verdict. The state comes along with it, so that the rule can run
on Python numbers, and only what has changed goes back to the device. The rule's own operations
would be some twenty kernels on scalars.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope

from lossscale.frameworks.common import host_rule
from lossscale.rules import ScaleState


def host_can_move(optimizer: Any) -> bool:
    """Whether `move` gives what the rule gives on the device, for the step that is taken now."""
    return (
        optimizer._state is not None
        and host_rule.host_can_move(optimizer._rule)
        # Where values are passed in and out, variables do not hold them.
        and not in_stateless_scope()
        and not torch.compiler.is_compiling()
    )


def read_with(optimizer: Any, found: Any) -> tuple[bool, ScaleState]:
    """Waits for a verdict, and brings the state along.

    Args:
        optimizer: One for which `host_can_move` with a rule that checks gradients.
        found: float32 scalar tensor; not 0 if a gradient is not finite.

    Returns:
        Whether `found` is not 0, and the state as Python numbers.
    """
    variables = optimizer._state.variables
    scale, good_steps = variables["scale"]._value, variables["good_steps"]._value
    parts = (found.view(torch.int32), scale.view(torch.int32), good_steps)
    bits = torch.stack([part.to(found.device) for part in parts]).tolist()
    return bits[0] != 0, ScaleState(_float32(bits[1]), bits[2])


def _float32(bits: int) -> float:
    number: float = struct.unpack("=f", struct.pack("=i", bits))[0]
    return number


def move(optimizer: Any, before: ScaleState | None, applied: bool) -> None:
    """Moves the state and counts the step.

    Args:
        optimizer: One for which `host_can_move`.
        before: The state before the step, as Python numbers; None if nothing was checked.
        applied: Whether the step was applied.
    """
    skipped = optimizer._steps_skipped._value
    if before is not None:
        for field, value in host_rule.changes(optimizer._rule, before, applied).items():
            optimizer._state.variables[field]._value.fill_(value)
        optimizer._last_step_skipped._value.fill_(not applied)
        if not applied:
            skipped.add_(1)
    applied_steps = optimizer.inner_optimizer._iterations._value
    optimizer._iterations._value.copy_(applied_steps + skipped)

"""PyTorch: the loss scale's state, read and moved by the host.

The host has to wait once for the verdict. The state comes along with it, so that the rule can run
on Python numbers, and only what has changed goes back to the device. The rule's own operations
would be some twenty kernels on scalars.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from lossscale.common import host_rule
from lossscale.keras.private_names import in_stateless_scope
from lossscale.keras.state import Ledger, State
from lossscale.keras.step import Step
from lossscale.rules import ScaleState


def host_can_move(step: Step, ledger: Ledger) -> bool:
    """Whether `move` gives what the rule gives on the device, for the step that is taken now."""
    return (
        ledger.state is not None
        and step.moves_on_host
        # Where values are passed in and out, variables do not hold them.
        and not in_stateless_scope()
        and not torch.compiler.is_compiling()
    )


def read_with(ledger: Ledger, found: Any) -> tuple[bool, ScaleState]:
    """Waits for a verdict, and brings the state along.

    Args:
        ledger: One for which `host_can_move`, of a rule that checks gradients.
        found: float32 scalar tensor; not 0 if a gradient is not finite.

    Returns:
        Whether `found` is not 0, and the state as Python numbers.
    """
    state = _state_of(ledger)
    tensors = [state.variables[field]._value for field in state.first._fields]
    bits = torch.stack([_bits(tensor).to(found.device) for tensor in (found, *tensors)]).tolist()
    values = [_number(tensor.dtype, bit) for tensor, bit in zip(tensors, bits[1:], strict=True)]
    return bits[0] != 0, type(state.first)(*values)


def _state_of(ledger: Ledger) -> State:
    assert ledger.state is not None
    return ledger.state


def _bits(tensor: Any) -> Any:
    """The bits of a float32 scalar as an integer; of others their value."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def _number(dtype: Any, bits: int) -> Any:
    if dtype == torch.float32:
        return struct.unpack("=f", struct.pack("=i", bits))[0]
    return bool(bits) if dtype == torch.bool else bits


def move(ledger: Ledger, inner: Any, before: ScaleState | None, applied: bool) -> None:
    """Moves the state and counts the step.

    Args:
        ledger: One for which `host_can_move`.
        inner: The inner optimizer.
        before: The state before the step, as Python numbers; None if nothing was checked.
        applied: Whether the step was applied.
    """
    skipped = ledger.steps_skipped._value
    if before is not None:
        state = _state_of(ledger)
        for field, value in host_rule.changes(state.rule, before, applied).items():
            state.variables[field]._value.fill_(value)
        ledger.last_step_skipped._value.fill_(not applied)
        if not applied:
            skipped.add_(1)
    ledger.iterations._value.copy_(inner._iterations._value + skipped)

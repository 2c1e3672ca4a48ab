"""What JAX traced: its equations, and what they call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

_CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Primitives that call what is traced in them, and do nothing else."""


def bind(jaxpr: Any, equation: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns what an equation makes of its inputs.

    Args:
        jaxpr: Where it stands.
        equation: The equation. The scopes it was traced in name what it becomes.
        arguments: Arrays, one for each of its inputs.
    """
    given = [
        (atom, argument)
        for atom, argument in zip(equation.invars, arguments, strict=True)
        if not isinstance(atom, Literal)
    ]
    alone = jaxpr.replace(
        constvars=[],
        invars=[atom for atom, _ in given],
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
    )
    return list(jaxpr_as_fun(ClosedJaxpr(alone, []))(*(argument for _, argument in given)))


def static_size(array: Any) -> int | None:
    """How many elements an array has; None if that is a symbol (`jax.export`)."""
    return array.size if isinstance(array.size, int) else None


def branches(equation: Any) -> Sequence[Any]:
    """The closed jaxprs that a `lax.switch` chooses from; none of another equation.

    Nor of one that chooses by the platform: its branches are not compiled for the others.
    """
    if equation.primitive.name != "cond" or equation.params.get("branches_platforms"):
        return ()
    return tuple(equation.params["branches"])


def called(equation: Any) -> Any:
    """The closed jaxpr that an equation calls and that can stand in its place, or None."""
    if equation.primitive.name not in _CALLS:
        return None
    parameters = equation.params
    laid_out = [*parameters.get("in_shardings", ()), *parameters.get("out_shardings", ())]
    # Such a call needs more than its equations contain.
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in laid_out):
        return None
    called = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return called if hasattr(called, "consts") else None

"""Jaxprs: their equations, and the jaxprs that those call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

_CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Primitives that only call a jaxpr."""


def bind(jaxpr: Any, equation: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation for given inputs.

    Args:
        jaxpr: The jaxpr that contains the equation.
        equation: The equation. It is evaluated in the name scopes in which it was traced.
        arguments: An array for each input.
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
    """The number of elements of an array; None if it is symbolic (`jax.export`)."""
    return array.size if isinstance(array.size, int) else None


def branches(equation: Any) -> Sequence[Any]:
    """The closed jaxprs that a `lax.switch` selects from; empty for another equation.

    Empty too for a switch on the platform, whose other branches may not compile here.
    """
    if equation.primitive.name != "cond" or equation.params.get("branches_platforms"):
        return ()
    return tuple(equation.params["branches"])


def called(equation: Any) -> Any:
    """The closed jaxpr that an equation calls and that can replace it, or None."""
    if equation.primitive.name not in _CALLS:
        return None
    parameters = equation.params
    laid_out = [*parameters.get("in_shardings", ()), *parameters.get("out_shardings", ())]
    # A call with shardings also moves arrays, which its equations do not show.
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in laid_out):
        return None
    called = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return called if hasattr(called, "consts") else None

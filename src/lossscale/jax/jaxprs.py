"""Evaluates what JAX traced, replacing chosen outputs as soon as they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

Choose = Callable[[Any, Any], Any]
"""Takes what was made and what is given for an output; returns which of them goes on."""

Guard = Callable[[Callable[[], list[Any]], Sequence[Any]], list[Any]]
"""Takes what runs an equation and the types of what it makes; returns arrays of these types."""

_CONTROL_FLOW = {"cond", "while", "scan"}
_CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Primitives that call what is traced in them, and do nothing else."""

_LARGE = 2**12
"""Copies of arrays of fewer elements do not matter."""


def evaluate(
    closed: Any,
    inputs: Sequence[Any],
    *,
    gates: Mapping[int, Any] | None = None,
    choose: Choose | None = None,
    guard: Guard | None = None,
) -> list[Any]:
    """Evaluates a closed jaxpr.

    Args:
        closed: The jaxpr, with its constants.
        inputs: Arrays, one for each of its inputs.
        gates: By number of an output, what `choose` is given with it.
        choose: What becomes of these outputs. It must be idempotent: what is chosen from what was
            chosen is the same.
        guard: Runs the equations that do something besides making arrays, such as printing.

    Returns:
        The outputs.
    """
    jaxpr, gates = closed.jaxpr, gates or {}
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))
    wanted: dict[Any, int] = {}
    for number in gates:
        variable = jaxpr.outvars[number]
        if isinstance(variable, Literal) or not variable.aval.shape:
            # There is no room to spare with a scalar. At the end it is chosen for the output alone:
            # with a count that stays 0, Adam would divide 0 by 0.
            continue
        # Of a variable that is two outputs the first is chosen here, the other at the end.
        if variable not in values:
            wanted.setdefault(variable, number)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        here = {
            index: wanted[variable]
            for index, variable in enumerate(equation.outvars)
            if variable in wanted
        }
        guarded = guard is not None and bool(equation.effects)
        called = _called(equation) if here or guarded else None
        if called is not None:
            below = {index: gates[number] for index, number in here.items()}
            made = evaluate(called, arguments, gates=below, choose=choose, guard=guard)
        else:
            made = bind(jaxpr, equation, arguments, guard if guarded else None)
            for index, number in here.items():
                made[index] = choose(made[index], gates[number])  # type: ignore[misc]
        values.update(zip(equation.outvars, made, strict=True))

    outputs = [
        jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]
        for atom in jaxpr.outvars
    ]
    for number, old in gates.items():
        variable = jaxpr.outvars[number]
        chosen_already = not isinstance(variable, Literal) and wanted.get(variable) == number
        if not chosen_already:
            outputs[number] = choose(outputs[number], old)  # type: ignore[misc]
    return outputs


def made_by_control_flow(closed: Any, first: int) -> bool:
    """Whether large outputs, from number `first` on, come out of a branch or a loop."""
    makers = {variable: equation for equation in closed.jaxpr.eqns for variable in equation.outvars}
    for variable in closed.jaxpr.outvars[first:]:
        equation = None if isinstance(variable, Literal) else makers.get(variable)
        if equation is None or (static_size(variable.aval) or 0) < _LARGE:
            continue
        if equation.primitive.name in _CONTROL_FLOW:
            return True
        called = _called(equation)
        if called is not None and made_by_control_flow(called, 0):
            return True
    return False


def bind(jaxpr: Any, equation: Any, arguments: list[Any], guard: Guard | None = None) -> list[Any]:
    """Returns what an equation makes of its inputs.

    Args:
        jaxpr: Where it stands.
        equation: The equation. The scopes it was traced in name what it becomes.
        arguments: Arrays, one for each of its inputs.
        guard: As for `evaluate`.
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

    def run() -> list[Any]:
        return list(jaxpr_as_fun(ClosedJaxpr(alone, []))(*(argument for _, argument in given)))

    if guard is None:
        return run()
    return guard(run, [variable.aval for variable in equation.outvars])


def static_size(array: Any) -> int | None:
    """How many elements an array has; None if that is a symbol (`jax.export`)."""
    return array.size if isinstance(array.size, int) else None


def _called(equation: Any) -> Any:
    """The closed jaxpr that an equation calls and that can stand in its place, or None."""
    if equation.primitive.name not in _CALLS:
        return None
    parameters = equation.params
    laid_out = [*parameters.get("in_shardings", ()), *parameters.get("out_shardings", ())]
    # Such a call asks for more than its equations say.
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in laid_out):
        return None
    called = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return called if hasattr(called, "consts") else None

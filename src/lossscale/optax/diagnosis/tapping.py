"""What a loss in JAX computes on the way: gradients by the values that it has named.

JAX knows no layers. A value that went through `jax.ad_checkpoint.checkpoint_name` is found in what
JAX has traced, and something that is zero is added to it; the gradient by that is the one by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from lossscale.jax.jaxprs import bind

_NAME = "name"
"""The primitive of a value with a name."""

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
"""Primitives whose value and derivative are those of what is traced in them."""


def named_values(closed: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values with names in what was traced.

    Args:
        closed: The closed jaxpr.

    Returns:
        Their names, in order, to their shapes and dtypes; names that recur get a number. And the
        names in loops, branches and derivatives of the user's, from which no gradient gets out.
    """
    found = dict(zip(_keys(closed.jaxpr), _avals(closed.jaxpr), strict=True))
    return found, tuple(dict.fromkeys(_hidden(closed.jaxpr)))


def gradients(closed: Any, inputs: Sequence[Any]) -> dict[str, Any]:
    """The gradients of the first output of what was traced, by the values with names in it.

    Args:
        closed: The closed jaxpr.
        inputs: Arrays, one for each of its inputs.
    """
    found, _ = named_values(closed)
    zeros = {name: jnp.zeros(aval.shape, aval.dtype) for name, aval in found.items()}

    def output(probes: Mapping[str, Any]) -> Any:
        return _evaluated(closed.jaxpr, closed.consts, inputs, iter(probes[name] for name in found))

    by_name: dict[str, Any] = jax.grad(lambda probes: output(probes)[0])(zeros)
    return by_name


def _evaluated(
    jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any], probes: Iterator[Any]
) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        called = _called(equation)
        if called is not None:
            made = _evaluated(*called, given, probes)
        else:
            made = bind(jaxpr, equation, given)
            if _is_named(equation):
                made = [made[0] + next(probes)]
        values.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _in_order(jaxpr: Any) -> Iterator[Any]:
    """The equations, those of calls in the place of the calls."""
    for equation in jaxpr.eqns:
        called = _called(equation)
        if called is None:
            yield equation
        else:
            yield from _in_order(called[0])


def _keys(jaxpr: Any) -> list[str]:
    seen: dict[str, int] = {}
    keys = []
    for equation in filter(_is_named, _in_order(jaxpr)):
        name = equation.params["name"]
        seen[name] = seen.get(name, 0) + 1
        keys.append(f"{name}#{seen[name]}" if seen[name] > 1 else name)
    return keys


def _avals(jaxpr: Any) -> list[Any]:
    return [equation.outvars[0].aval for equation in filter(_is_named, _in_order(jaxpr))]


def _hidden(jaxpr: Any) -> Iterator[str]:
    for equation in _in_order(jaxpr):
        for below in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = below.jaxpr if isinstance(below, ClosedJaxpr) else below
            if hasattr(inner, "eqns"):
                yield from _keys(inner)
                yield from _hidden(inner)


def _is_named(equation: Any) -> bool:
    # Of integers there are no gradients.
    return bool(
        equation.primitive.name == _NAME
        and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    )


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation calls and that can stand in its place, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(called, ClosedJaxpr):
        return called.jaxpr, called.consts
    return None if called is None or called.constvars else (called, ())

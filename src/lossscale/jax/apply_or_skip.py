"""Applies an update or skips it: selects the new or the old value of each output at its source.

A select after the update costs memory: the new moments are used twice, as outputs and in the
update, and XLA copies the old ones to compute them twice. Here, everything that reads an output
reads the selected value. That is the new value if the step is applied. Otherwise it is the old
value, and anything computed from it is discarded. So nothing is copied, nothing branches, and all
devices run the same operations.

To find the equation that computes each output, the update is traced once; then the jaxpr is
evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

ArrayTree: TypeAlias = Any
"""Arrays in a structure of the user's: parameters, gradients or a state."""

Path: TypeAlias = tuple[object, ...]
"""The keys that lead to a leaf of such a tree, as JAX has them."""

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def select(finite: Array, new: Array, old: Array) -> Array:
    """The new value if the step is applied, else the old one, in `state_dtype`."""
    if new is old:
        return old
    dtype = state_dtype(new, old)
    return jnp.where(finite, jnp.asarray(new, dtype), jnp.asarray(old, dtype))


def state_dtype(new: Array, old: Array) -> np.dtype:
    """The dtype of an array after a step: the old dtype, so that the second step is not recompiled.

    The exception is a number that starts as an integer and becomes a fraction: it would lose the
    fraction.
    """
    if new.dtype == old.dtype:
        return old.dtype
    return new.dtype if _kind(new) > _kind(old) else old.dtype


def _kind(array: Array) -> int:
    kinds = (n for n, kind in enumerate(_KINDS) if jnp.issubdtype(array.dtype, kind))
    return next(kinds, len(_KINDS))


def gated(
    closed: ClosedJaxpr, inputs: Sequence[Array], old_values: Mapping[int, Array], finite: Array
) -> list[Array]:
    """Evaluates a jaxpr, with the old value of some outputs unless `finite`.

    Args:
        closed: A closed jaxpr.
        inputs: An array for each of its inputs.
        old_values: Old values by the index of the output.
        finite: A boolean scalar array.

    Returns:
        The outputs.
    """
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))

    def read(atom: Var | Literal) -> Array:
        value: Array = atom.val if isinstance(atom, Literal) else values[atom]
        return value

    # A scalar output saves no memory and is selected at the end: with a count that stays 0, Adam
    # would divide 0 by 0. The same holds for inputs, literals, and a variable that is an output
    # twice.
    wanted: dict[Var, int] = {}
    for number in old_values:
        variable = jaxpr.outvars[number]
        if not isinstance(variable, Literal) and variable.aval.shape and variable not in values:
            wanted.setdefault(variable, number)
    for equation in jaxpr.eqns:
        places = {i: wanted[var] for i, var in enumerate(equation.outvars) if var in wanted}
        here = {i: old_values[number] for i, number in places.items()}
        arguments = [read(atom) for atom in equation.invars]
        made = _gated_equation(jaxpr, equation, arguments, here, finite)
        values.update(zip(equation.outvars, made, strict=True))

    early = set(wanted.values())
    outputs = [
        jnp.asarray(atom.val, cast("jax.core.ShapedArray", atom.aval).dtype)
        if isinstance(atom, Literal)
        else values[atom]
        for atom in jaxpr.outvars
    ]
    for number in old_values.keys() - early:
        outputs[number] = select(finite, outputs[number], old_values[number])
    return outputs


def _gated_equation(
    jaxpr: Jaxpr,
    equation: JaxprEqn,
    arguments: list[Array],
    old_values: Mapping[int, Array],
    finite: Array,
) -> list[Array]:
    """Evaluates one equation of a jaxpr as `gated` evaluates a jaxpr."""
    called = _called(equation) if old_values or equation.effects else None
    if called is not None:
        return gated(called, arguments, old_values, finite)

    def run() -> list[Array]:
        return bind(jaxpr, equation, arguments)

    def silent() -> list[Array]:
        avals = [cast("jax.core.ShapedArray", variable.aval) for variable in equation.outvars]
        return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]

    if equation.effects:
        # Printing and logging are silent on a skipped step, and their results are not used.
        made: list[Array] = jax.lax.cond(finite, run, silent)
    elif old_values and (branches := _branches(equation)):
        return _gated_branches(branches, arguments, old_values, finite)
    else:
        made = run()
    for index, old in old_values.items():
        made[index] = select(finite, made[index], old)
    return made


def _gated_branches(
    branches: Sequence[ClosedJaxpr],
    arguments: list[Array],
    old_values: Mapping[int, Array],
    finite: Array,
) -> list[Array]:
    """Evaluates a `lax.switch` with the select in its branches: after it, both would be alive."""
    number, *operands = arguments

    def inside(branch: ClosedJaxpr) -> Callable[..., list[Array]]:
        def run(*given: Array) -> list[Array]:
            # Pass an old value into the branch only once.
            inputs = dict(zip(map(id, operands), given, strict=True))
            own = {n: inputs.get(id(old), old) for n, old in old_values.items()}
            return gated(branch, given, own, finite)

        return run

    return list(jax.lax.switch(number, [inside(branch) for branch in branches], *operands))


def bind(jaxpr: Jaxpr, equation: JaxprEqn, arguments: Sequence[Array]) -> list[Array]:
    """Returns the outputs of an equation for given inputs.

    Args:
        jaxpr: The jaxpr that contains the equation.
        equation: The equation. It is evaluated in the name scopes in which it was traced.
        arguments: An array for each input.
    """
    pairs = zip(equation.invars, arguments, strict=True)
    given = [pair for pair in pairs if not isinstance(pair[0], Literal)]
    alone = jaxpr.replace(
        constvars=[],
        invars=[atom for atom, _ in given],
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
    )
    return list(jaxpr_as_fun(ClosedJaxpr(alone, []))(*(argument for _, argument in given)))


def _branches(equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
    """The closed jaxprs that a `lax.switch` selects from; empty for another equation.

    Empty too for a switch on the platform, whose other branches may not compile here.
    """
    if equation.primitive.name != "cond" or equation.params.get("branches_platforms"):
        return ()
    return tuple(equation.params["branches"])


def _called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The closed jaxpr that an equation calls and that can replace it, or None."""
    if equation.primitive.name not in _CALLS:
        return None
    parameters = equation.params
    shardings = [*parameters.get("in_shardings", ()), *parameters.get("out_shardings", ())]
    # A call with shardings also moves arrays, which its equations do not show.
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None
    called = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return called if hasattr(called, "consts") else None


_CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Primitives that only call a jaxpr."""


def varying_axes(array: Array) -> frozenset[str]:
    """The axes of the enclosing `shard_map` along which an array varies, as far as JAX knows."""
    kind = jax.typeof(array)
    # JAX 0.10 stores it in one of these, earlier releases in the other.
    axes = getattr(getattr(kind, "mat", None), "varying", None) or getattr(kind, "vma", None)
    return frozenset(axes or ())


def has_sharding(array: Array) -> bool:
    """Whether the type of an array contains its sharding.

    Such an array can be concatenated with others only if all are moved to one sharding.
    """
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None)
    return any(axis is not None for axis in spec or ())


def may_be_sharded(array: Array) -> bool:
    """Whether a compiler may divide an array among devices, which its type does not say."""
    mesh = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return False
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind == jax.sharding.AxisType.Auto and size > 1 for kind, size in axes)


def static_size(array: Array) -> int | None:
    """The number of elements of an array; None if it is symbolic (`jax.export`)."""
    return array.size if isinstance(array.size, int) else None

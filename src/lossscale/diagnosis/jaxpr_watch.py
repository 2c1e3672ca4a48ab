"""Evaluates a jaxpr, and finds the first equation whose result is not finite.

Forward and backward pass are one list of equations. What they call, also in loops of unknown length
and in branches, is evaluated equation by equation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from lossscale.framework_types import Array
from lossscale.jax.apply_or_skip import ArrayTree, bind
from lossscale.monitoring.explanation import FailedOperation, Origin
from lossscale.monitoring.origins import (
    Call,
    Evaluated,
    Evaluation,
    Origins,
    Watched,
    is_float,
    line_of,
)

_TRANSFORMS = {"jvp", "transpose", "vmap", "jit", "pjit", "checkpoint", "rematted_computation"}
_DERIVED = {"div", "rsqrt", "sqrt", "cbrt", "log", "log1p", "pow", "integer_pow"}
_DERIVED |= {"acos", "asin", "atanh", "atan2"}
"""Operations whose derivatives may not be finite."""
_NARROW = (jnp.float16, jnp.bfloat16, jnp.float32)


class JaxprWatch:
    """Evaluates the jaxpr of a function, `closed`.

    Args:
        compute: Returns the loss and its gradients for a tree of arrays and a loss scale.
        arrays: The arrays.
        names: The name of each, and whether it is a parameter.
        plain: Returns the name of a module for the path of an operation.
    """

    def __init__(
        self,
        compute: Callable[[ArrayTree, jax.typing.ArrayLike], ArrayTree],
        arrays: ArrayTree,
        names: Sequence[tuple[str, bool]],
        plain: Callable[[str], str] = str,
    ) -> None:
        # Without compiled functions, the steps of a scan are equations of their own.
        with jax.disable_jit():
            self.closed = jax.make_jaxpr(compute)(arrays, 1.0)
        self._arrays, self._names, self._plain = jax.tree.leaves(arrays), names, plain

    def __call__(self, scale: float) -> Watched:
        """Evaluates it, and returns the origins of what is not finite."""
        named = list(zip(self._names, self._arrays, strict=True))
        weights = {id(array): name for (name, is_weight), array in named if is_weight}
        self._evaluation = Evaluation(lambda value: weights.get(id(value), ""))
        # The equation that is evaluated, after those that call it.
        self._nested: list[JaxprEqn] = []
        self._derived: dict[FailedOperation, str] = {}
        origin_of = self._evaluation.origin_of
        origins = [origin_of(array, name, is_weight=kind) for (name, kind), array in named]
        given = [*self._arrays, np.float32(scale)]
        try:
            # These would raise what is to be explained.
            with jax.debug_nans(False), jax.debug_infs(False):
                values, (loss, *gradients) = self._evaluate(self.closed, given, [*origins, None])
        except Exception as error:
            return self._evaluation.watched_until(error)
        first = next((each for each in gradients if each and not each.is_mask), None)
        if loss is None and first and first.failed and first not in self._evaluation.absorbed:
            # The forward pass is finite, so it is a part of a derivative.
            operation = self._derived[first.failed]
            first = Origin(first.failed._replace(operation=operation, in_backward=True))
        return self._evaluation.watched(values[:1], loss, first)

    def _evaluate(
        self, closed: ClosedJaxpr, arguments: Sequence[Array], origins: Origins
    ) -> Evaluated:
        """Returns the outputs of a jaxpr, and the origins of those that are not finite."""
        jaxpr = closed.jaxpr
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        origin_of = self._evaluation.origin_of
        values = dict(zip(inputs, [*closed.consts, *arguments], strict=True))
        known = dict(zip(inputs, [*map(origin_of, closed.consts), *origins], strict=True))
        constants = self._evaluation.constants
        constants.update((id(each), each) for each in closed.consts)

        def read(atoms: Sequence[Var | Literal]) -> Evaluated:
            for atom in atoms:
                if isinstance(atom, Literal):
                    values[id(atom)] = constants[id(atom.val)] = atom.val
                    known[id(atom)] = origin_of(atom.val)
            keys = [id(atom) if isinstance(atom, Literal) else atom for atom in atoms]
            return [values[key] for key in keys], [known[key] for key in keys]

        for equation in jaxpr.eqns:
            given, taken = read(equation.invars)
            self._nested.append(equation)
            made, found = self._inner(equation, given, taken) or self._bound(jaxpr, given, taken)
            self._nested.pop()
            values.update(zip(equation.outvars, made, strict=True))
            known.update(zip(equation.outvars, found, strict=True))
        return read(jaxpr.outvars)

    def _bound(self, jaxpr: Jaxpr, given: Sequence[Array], taken: Origins) -> Evaluated:
        """Evaluates an equation that calls nothing."""
        equation = self._nested[-1]
        made = bind(jaxpr, equation, given)
        literals = [atom.val for atom in equation.invars if isinstance(atom, Literal)]
        name = equation.primitive.name
        call = Call(
            name,
            name,
            self._plain(_module(self._nested)),
            "transpose(" in _scopes(self._nested),
            any(map(self._evaluation.origin_of, literals)),
            lambda change: _widened(equation, list(map(change, given))),
        )
        found = self._evaluation.origins(call, given, taken, made)
        for origin in found:
            if origin and origin.failed and origin.failed not in self._derived:
                self._derived[origin.failed] = _derived(jaxpr, equation)
        return made, found

    def _inner(
        self, equation: JaxprEqn, given: Sequence[Array], taken: Origins
    ) -> Evaluated | None:
        """Evaluates what an equation calls; None if it calls nothing."""
        if equation.primitive.name == "while":
            return self._loop(equation.params, given, taken)
        if equation.primitive.name == "cond":
            branches = equation.params["branches"]
            chosen = branches[int(np.clip(int(given[0]), 0, len(branches) - 1))]
            return self._evaluate(chosen, given[1:], taken[1:])
        called = _called(equation)
        return None if called is None else self._evaluate(called, given, taken)

    def _loop(self, params: Mapping[str, Any], given: Sequence[Array], taken: Origins) -> Evaluated:
        """Evaluates a `while`."""
        tests, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry, origins = given[constants:], taken[constants:]
        select: ClosedJaxpr | None = None

        def evaluated(name: str, part: slice) -> Evaluated:
            return self._evaluate(params[name], [*given[part], *carry], [*taken[part], *origins])

        while np.any(test := np.asarray(evaluated("cond_jaxpr", slice(tests))[0][0])):
            new, found = evaluated("body_jaxpr", slice(tests, constants))
            # Within `vmap`, each row has a test.
            if test.ndim:
                select = select or jax.make_jaxpr(_select)(test, new, carry)
                both = [None, *found, *origins]
                new, found = self._evaluate(select, [test, *new, *carry], both)
            carry, origins = new, found
        return carry, origins


def _called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls with its inputs; None if it calls none."""
    for value in equation.params.values():
        is_open = isinstance(value, Jaxpr) and not value.constvars
        closed = ClosedJaxpr(value, []) if is_open else value
        if isinstance(closed, ClosedJaxpr) and len(closed.jaxpr.invars) == len(equation.invars):
            return closed
    return None


def _select(test: jax.Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """The results for the rows of a batch for which a test is true, and the old ones for others."""

    def chosen(one: Array, other: Array) -> jax.Array:
        shape = test.shape + (1,) * (jnp.ndim(one) - test.ndim)
        return jnp.where(test.reshape(shape), one, other)

    return jax.tree.map(chosen, new, old)


# --- Names --------------------------------------------------------------------------------------


def _scopes(nested: Sequence[JaxprEqn]) -> str:
    """The scopes of an equation, which comes last, and of the equations that call it."""
    return "/".join(str(each.source_info.name_stack) for each in nested)


def _module(nested: Sequence[JaxprEqn]) -> str:
    """The path of the module of an equation, or the line of its function."""
    # What is computed again for the backward pass has its scopes twice.
    scopes = re.sub(r"transpose\(jvp\((.*?)\)\)/jvp\(\1\)", r"\1", _scopes(nested))
    path = "/".join(each for each in re.findall(r"[^/()]+", scopes) if each not in _TRANSFORMS)
    return path or next(filter(None, map(_line, reversed(nested))), "")


def _line(equation: JaxprEqn) -> str:
    calls = source_info_util.summarize(equation.source_info, 99).splitlines()
    parts = [re.fullmatch(r"(.*?):(\d+)(?::\d+)? \((.*)\)", each) for each in reversed(calls)]
    return line_of([(each[1], int(each[2]), each[3]) for each in parts if each])


def _derived(jaxpr: Jaxpr, equation: JaxprEqn) -> str:
    """The name of an operation of a derivative, by what is derived at the same place."""
    place = source_info_util.summarize(equation.source_info)
    earlier = jaxpr.eqns[: jaxpr.eqns.index(equation)]
    same = [
        each
        for each in earlier
        if each.primitive.name in _DERIVED and source_info_util.summarize(each.source_info) == place
    ]
    # A derivative takes what the operation took, or its result.
    taken = set(map(id, equation.invars))
    uses = [each for each in same if not taken.isdisjoint(map(id, (*each.invars, *each.outvars)))]
    found = next(iter((*uses, *same)), equation)
    return f"backward of {found.primitive.name}"


def _widened(equation: JaxprEqn, given: Sequence[Array]) -> list[Array]:
    """The results of an equation in float64."""

    def wider(value: object) -> object:
        is_dtype = isinstance(value, np.dtype) and value in _NARROW
        return np.dtype(np.float64) if is_dtype else value

    enable: Any = getattr(jax, "enable_x64", None)
    if enable is None:
        enable = jax.experimental.enable_x64  # type: ignore[attr-defined]  # in earlier releases
    params: Mapping[str, Any] = {name: wider(value) for name, value in equation.params.items()}
    with enable(True):
        inputs = [
            jnp.asarray(np.asarray(each, np.float64)) if is_float(each) else each for each in given
        ]
        made = equation.primitive.bind(*inputs, **params)
        return list(map(np.asarray, made if isinstance(made, list) else [made]))

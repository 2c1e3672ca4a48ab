"""Evaluates a jaxpr, and finds the first equation whose result is not finite.

Forward and backward pass are one list of equations. What they call, also in loops of unknown length
and in branches, is evaluated equation by equation.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from numpy.typing import NDArray

from lossscale.explain.origins import Call, Evaluation, Value, Watched, is_float, line_of
from lossscale.explain.text import Origin
from lossscale.framework_types import Array
from lossscale.jax.apply_or_skip import ArrayTree, bind

_TRANSFORMS = {"jvp", "transpose", "vmap", "jit", "pjit", "checkpoint", "rematted_computation"}
_CORE = os.path.join("jax", "_src", "core.py")
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
        self._evaluation = Evaluation()
        # The equation that is evaluated, after those that call it.
        self._nested: list[JaxprEqn] = []
        self._forward: dict[int, JaxprEqn] = {}
        self._failed: dict[Origin, JaxprEqn] = {}
        named = [(array, *name) for array, name in zip(self._arrays, self._names, strict=True)]
        named.append((np.float32(scale), "", False))
        # These would raise what is to be explained.
        with jax.debug_nans(False), jax.debug_infs(False):
            found = self._evaluation.evaluated(named, lambda g: self._evaluate(self.closed, g))
        first = found.gradients
        if found.loss or first not in self._failed or first in self._evaluation.absorbed:
            return found
        # The forward pass is finite, so it is a part of a derivative.
        name = f"backward of {self._derived(self._failed[first])}"
        return found._replace(gradients=first._replace(operation=name, in_backward=True))

    def _evaluate(self, closed: ClosedJaxpr, given: Sequence[Value]) -> list[Value]:
        """Returns the outputs of a jaxpr."""
        jaxpr, constants = closed.jaxpr, self._evaluation.constants
        origin_of = self._evaluation.origin_of
        constants.update((id(each), each) for each in closed.consts)
        inputs = [*((each, origin_of(each)) for each in closed.consts), *given]
        known: dict[Var, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(atom: Var | Literal) -> Value:
            if not isinstance(atom, Literal):
                return known[atom]
            constants[id(atom.val)] = atom.val
            return atom.val, origin_of(atom.val)

        for equation in jaxpr.eqns:
            self._nested.append(equation)
            arguments = list(map(read, equation.invars))
            made = self._inner(equation, arguments)
            made = self._bound(jaxpr, equation, arguments) if made is None else made
            known.update(zip(equation.outvars, made, strict=True))
            self._nested.pop()
        return list(map(read, jaxpr.outvars))

    def _bound(self, jaxpr: Jaxpr, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
        """Evaluates an equation that calls nothing."""
        given = [value for value, _ in inputs]
        made = bind(jaxpr, equation, given)
        name, in_backward = equation.primitive.name, "transpose(" in _scopes(self._nested)
        if not in_backward:
            self._forward.setdefault(id(equation), equation)
        module = self._plain(_module(self._nested))
        call = Call(name, name, module, in_backward, lambda: _widened(equation, given))
        found = self._evaluation.origins(call, inputs, made)
        for origin in filter(None, found):
            self._failed.setdefault(origin, equation)
        return list(zip(made, found, strict=True))

    def _derived(self, equation: JaxprEqn) -> str:
        """The name of the operation that an equation of a derivative belongs to."""
        call = _call(equation)
        found = (each for each in self._forward.values() if _call(each) == call)
        return str(next(found, equation).primitive.name)

    def _inner(self, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value] | None:
        """Evaluates what an equation calls; None if it calls nothing."""
        if equation.primitive.name == "while":
            return self._loop(equation.params, inputs)
        if equation.primitive.name == "cond":
            branches = equation.params["branches"]
            chosen = branches[int(np.clip(int(inputs[0][0]), 0, len(branches) - 1))]
            return self._evaluate(chosen, inputs[1:])
        called = _called(equation)
        return None if called is None else self._evaluate(called, inputs)

    def _loop(self, params: Mapping[str, Any], inputs: Sequence[Value]) -> list[Value]:
        """Evaluates a `while`."""
        tests, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = list(inputs[constants:])

        def evaluated(name: str, part: slice) -> list[Value]:
            return self._evaluate(params[name], [*inputs[part], *carry])

        while np.any(test := np.asarray(evaluated("cond_jaxpr", slice(tests))[0][0])):
            new = evaluated("body_jaxpr", slice(tests, constants))
            # Within `vmap`, each row has a test.
            carry = [self._selected(test, *each) for each in zip(new, carry, strict=True)]
        return carry

    def _selected(self, test: NDArray[np.bool_], new: Value, old: Value) -> Value:
        """The new result where a test is true, that of each row of a batch, else the old one."""
        rows = test.reshape(test.shape + (1,) * (np.ndim(new[0]) - test.ndim))
        chosen = jnp.where(rows, new[0], old[0]) if test.ndim else new[0]
        return chosen, (new[1] or old[1]) if any(self._evaluation.flags_of(chosen)) else None


def _called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls with its inputs; None if it calls none."""
    for value in equation.params.values():
        is_open = isinstance(value, Jaxpr) and not value.constvars
        closed = ClosedJaxpr(value, []) if is_open else value
        if isinstance(closed, ClosedJaxpr) and len(closed.jaxpr.invars) == len(equation.invars):
            return closed
    return None


# --- Names --------------------------------------------------------------------------------------


def _scopes(nested: Sequence[JaxprEqn]) -> str:
    """The scopes of an equation, which comes last, and of the equations that call it."""
    return "/".join(str(each.source_info.name_stack) for each in nested)


def _module(nested: Sequence[JaxprEqn]) -> str:
    """The path of the module of an equation, or the line of its function."""
    # What is computed again for the backward pass has its scopes twice.
    scopes = re.sub(r"transpose\(jvp\((.*?)\)\)/jvp\(\1\)", r"\1", _scopes(nested))
    path = "/".join(each for each in re.findall(r"[^/()]+", scopes) if each not in _TRANSFORMS)
    lines = (line_of(_frames(each)) for each in reversed(nested))
    return path or next(filter(None, lines), "")


def _frames(equation: JaxprEqn) -> list[tuple[str, int, str]]:
    """The file, the line and the function of each call, the innermost first."""
    # It may be None, unlike its annotation.
    traceback: Any = equation.source_info.traceback
    return [(f.file_name, f.line_num, f.function_name) for f in getattr(traceback, "frames", ())]


def _call(equation: JaxprEqn) -> object:
    """The call of the program, or of a function of JAX, that an equation comes from.

    Derivatives are made within the call of the operation that is derived, or get its traceback.
    """

    def is_outside(frame: tuple[str, int, str]) -> bool:
        return not (frame[2].endswith("bind") and frame[0].endswith(_CORE))

    return tuple(itertools.takewhile(is_outside, reversed(_frames(equation)))) or id(equation)


def _widened(equation: JaxprEqn, given: Sequence[Array]) -> list[Array]:
    """The results of an equation in float64."""

    def wider(value: object) -> object:
        is_dtype = isinstance(value, np.dtype) and value in _NARROW
        return np.dtype(np.float64) if is_dtype else value

    # It has moved.
    enable: Any = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    params: Mapping[str, Any] = {name: wider(value) for name, value in equation.params.items()}
    with enable(True):
        inputs = [
            jnp.asarray(np.asarray(each, np.float64)) if is_float(each) else each for each in given
        ]
        made = equation.primitive.bind(*inputs, **params)
        return list(map(np.asarray, made if isinstance(made, list) else [made]))

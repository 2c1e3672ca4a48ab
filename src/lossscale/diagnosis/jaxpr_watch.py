"""Evaluates a jaxpr, and finds the first equation whose result is not finite.

Forward and backward pass are one list of equations. What they call, also in loops and branches, is
evaluated equation by equation.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from lossscale.jax.apply_or_skip import bind
from lossscale.monitoring.explanation import LARGEST, FailedOperation, Origin
from lossscale.monitoring.origins import Flags, Watched, is_harmed, overflow_in, passed_on

_TRANSFORMS = {"jvp", "transpose", "vmap", "jit", "pjit", "checkpoint", "rematted_computation"}
_ADDING = ("add", "max", "clamp")
_SINGULAR = ("div", "rsqrt", "sqrt", "log", "log1p", "pow", "integer_pow", "acos", "asin", "atanh")
_SMALL = 2.0**-14
"""The smallest float16 number with all digits."""
_MASK = Origin(is_mask=True)
_FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)


class JaxprWatch:
    """Evaluates the jaxpr of a loss and its gradients.

    Args:
        closed: The closed jaxpr. Its first output is the loss, the others are gradients.
        names: The name of each input, and whether it is a parameter.
        epsilons: What `small_numbers` returns for the same pass in float32.
        plain: Returns the name of a module for the path of an operation.
    """

    def __init__(
        self,
        closed: Any,
        names: Sequence[tuple[str, bool]],
        epsilons: Mapping[str, float],
        plain: Callable[[str], str] = str,
    ) -> None:
        self._closed, self._names, self._epsilons = closed, names, epsilons
        self._plain = plain
        self._in_float16 = "f16[" in str(closed).replace("bf16[", "")
        self._derived: dict[FailedOperation, str] = {}

    def __call__(self, arguments: Sequence[Any]) -> Watched:
        """Evaluates it, and returns the origins of what is not finite."""
        origins = [
            Origin(name=name, is_weight=is_weight, is_mask=not is_weight and _is_mask(array))
            if any(_flags(array))
            else None
            for (name, is_weight), array in zip(self._names, arguments, strict=True)
        ]
        self._weights = {
            id(array): name
            for (name, is_weight), array in zip(self._names, arguments, strict=True)
            if is_weight
        }
        self._hidden: Origin | None = None
        self._absorbed: set[Origin] = set()
        self._callers: list[Any] = []
        _, found = self._evaluate(self._closed, arguments, origins)
        gradients = [each for each in found[1:] if each is not None and not each.is_mask]
        first = next(iter(gradients), None)
        if found[0] is None and first and first.failed and first not in self._absorbed:
            # The forward pass is finite, so it is a part of a derivative.
            operation = self._derived[first.failed]
            first = Origin(first.failed._replace(operation=operation, in_backward=True))
        return Watched(found[0], first, self._hidden)

    def _evaluate(
        self, closed: Any, arguments: Sequence[Any], origins: Sequence[Origin | None]
    ) -> tuple[list[Any], list[Origin | None]]:
        """Returns the outputs of a jaxpr, and the origins of those that are not finite."""
        jaxpr = closed.jaxpr
        masks = [_MASK if any(_flags(each)) else None for each in closed.consts]
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(inputs, [*closed.consts, *arguments], strict=True))
        known = dict(zip(inputs, [*masks, *origins], strict=True))

        def read(atoms: Sequence[Any]) -> tuple[list[Any], list[Origin | None]]:
            for atom in atoms:
                if isinstance(atom, Literal):
                    values[id(atom)] = atom.val
                    known[id(atom)] = _MASK if any(_flags(atom.val)) else None
            keys = [id(atom) if isinstance(atom, Literal) else atom for atom in atoms]
            return [values[key] for key in keys], [known[key] for key in keys]

        for equation in jaxpr.eqns:
            given, taken = read(equation.invars)
            calls: Callable[..., Any] = _INNER.get(equation.primitive.name, _called)
            inner = calls(equation, given)
            if inner is None:
                made = bind(jaxpr, equation, given)
                flags = list(map(_flags, made))
                infinite = [
                    (origin, _flags(each))
                    for origin, each in zip(taken, given, strict=True)
                    if origin is not None
                ]
                if infinite and not any(map(any, flags)):
                    self._note_harm(jaxpr, equation, given, made, overflow_in(infinite))
                found = [
                    self._origin(jaxpr, equation, given, infinite, each) if any(each) else None
                    for each in flags
                ]
            else:
                self._callers.append(equation)
                made, found = inner(self._evaluate, given, taken)
                self._callers.pop()
            values.update(zip(equation.outvars, made, strict=True))
            known.update(zip(equation.outvars, found, strict=True))
        return read(jaxpr.outvars)

    def _note_harm(
        self,
        jaxpr: Any,
        equation: Any,
        given: Sequence[Any],
        made: Sequence[Any],
        overflow: Origin | None,
    ) -> None:
        """Notes an overflow that ends here, and whether another number is made of 65,504."""
        if overflow is None or _is_backward([*self._callers, equation]):
            return
        self._absorbed.add(overflow)
        limits: dict[str, Any] = {"nan": math.nan, "posinf": LARGEST, "neginf": -LARGEST}
        lower = [jnp.nan_to_num(each, **limits) if _is_float(each) else each for each in given]
        for one, other in zip(made, bind(jaxpr, equation, lower), strict=True):
            if _is_float(one) and is_harmed(_largest(one - other), _largest(other)):
                self._hidden = self._hidden or overflow

    def _origin(
        self,
        jaxpr: Any,
        equation: Any,
        given: Sequence[Any],
        infinite: Sequence[tuple[Origin, Flags]],
        made: Flags,
    ) -> Origin:
        nested = [*self._callers, equation]
        in_backward = _is_backward(nested)
        literals = [atom.val for atom in equation.invars if isinstance(atom, Literal)]
        sets = any(any(_flags(value)) for value in literals)
        old = passed_on(infinite, made, sets=sets, in_backward=in_backward)
        if old is not None:
            return old
        name, module = equation.primitive.name, _module(nested)
        is_cast = name == "convert_element_type"
        floats = [np.asarray(each, np.float64) for each in given if is_cast or _is_float(each)]
        decisive = (floats[1:] or floats) if name == "div" else floats[:1]
        failed = FailedOperation(
            name,
            self._plain(module),
            in_backward,
            largest_input=max(map(_largest, floats), default=0.0),
            largest_result=_largest(floats[0]) if is_cast else _wide(equation, given),
            meets_zero=any((each == 0).any() for each in decisive),
            meets_negative=any((each < 0).any() for each in decisive),
            of_infinities=bool(infinite),
            cast_of=self._weights.get(id(given[0]), "") if is_cast else "",
            is_cast=is_cast,
            epsilon=self._epsilons.get(module, 0.0),
            in_float16=self._in_float16,
        )
        self._derived[failed] = _derived(jaxpr, equation)
        return Origin(failed)


# --- What an equation calls ---------------------------------------------------------------------

Evaluate = Callable[..., tuple[list[Any], list[Any]]]


def _called(equation: Any, given: Sequence[Any]) -> Any:
    """Evaluates the jaxpr that an equation calls; None if it calls none."""
    for value in equation.params.values():
        closed = value if hasattr(value, "consts") else None
        if closed is None and hasattr(value, "eqns") and not value.constvars:
            closed = ClosedJaxpr(value, [])
        if closed is not None and len(closed.jaxpr.invars) == len(given):
            return lambda evaluate, given, taken: evaluate(closed, given, taken)
    return None


def _branch(equation: Any, given: Sequence[Any]) -> Any:
    branches = equation.params["branches"]
    chosen = branches[int(np.clip(int(given[0]), 0, len(branches) - 1))]
    return lambda evaluate, given, taken: evaluate(chosen, given[1:], taken[1:])


def _scan(equation: Any, given: Sequence[Any]) -> Any:
    params = equation.params
    constants, carried = params["num_consts"], params["num_consts"] + params["num_carry"]

    def inner(evaluate: Evaluate, given: list[Any], taken: list[Any]) -> Any:
        carry, carry_origins = given[constants:carried], taken[constants:carried]
        count = len(equation.outvars) - params["num_carry"]
        rows: list[Any] = [None] * params["length"]
        found: list[Any] = [None] * count
        order = range(params["length"])
        for step in reversed(order) if params["reverse"] else order:
            made, origins = evaluate(
                params["jaxpr"],
                [*given[:constants], *carry, *(each[step] for each in given[carried:])],
                [*taken[:constants], *carry_origins, *taken[carried:]],
            )
            carry, carry_origins = made[: params["num_carry"]], origins[: params["num_carry"]]
            rows[step] = made[params["num_carry"] :]
            found = [a or b for a, b in zip(found, origins[params["num_carry"] :], strict=True)]
        shapes = equation.outvars[params["num_carry"] :]
        stacked = [
            jnp.stack([row[n] for row in rows]) if rows else jnp.zeros(v.aval.shape, v.aval.dtype)
            for n, v in enumerate(shapes)
        ]
        return [*carry, *stacked], [*carry_origins, *found]

    return inner


def _while(equation: Any, given: Sequence[Any]) -> Any:
    params = equation.params
    tests, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def inner(evaluate: Evaluate, given: list[Any], taken: list[Any]) -> Any:
        carry, origins = given[constants:], taken[constants:]
        while bool(
            evaluate(params["cond_jaxpr"], [*given[:tests], *carry], [*taken[:tests], *origins])[0][
                0
            ]
        ):
            carry, origins = evaluate(
                params["body_jaxpr"],
                [*given[tests:constants], *carry],
                [*taken[tests:constants], *origins],
            )
        return carry, origins

    return inner


_INNER: dict[str, Callable[..., Any]] = {"cond": _branch, "scan": _scan, "while": _while}


def _equations(jaxpr: Any, *callers: Any) -> Iterator[Sequence[Any]]:
    """The equations of a jaxpr, and of those that it calls, each after its callers."""
    for equation in jaxpr.eqns:
        yield *callers, equation
        for value in equation.params.values():
            for each in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, *callers, equation)


# --- Names --------------------------------------------------------------------------------------


def _scopes(nested: Sequence[Any]) -> str:
    """The scopes of an equation, which comes last, and of the equations that call it."""
    return "/".join(str(each.source_info.name_stack) for each in nested)


def _is_backward(nested: Sequence[Any]) -> bool:
    return "transpose(" in _scopes(nested)


def _module(nested: Sequence[Any]) -> str:
    """The path of the module of an equation, or the line of its function."""
    # What is computed again for the backward pass has its scopes twice.
    scopes = re.sub(r"transpose\(jvp\((.*?)\)\)/jvp\(\1\)", r"\1", _scopes(nested))
    path = "/".join(each for each in re.findall(r"[^/()]+", scopes) if each not in _TRANSFORMS)
    return path or next(filter(None, map(_line, reversed(nested))), "")


def _line(equation: Any) -> str:
    found = source_info_util.summarize(equation.source_info)
    parts = re.search(r":(\d+)(?::\d+)? \((.*)\)$", found)
    if parts is None:
        return ""
    names = [name for name in parts[2].split(".<locals>.") if name != "<lambda>"]
    return f"{['', *names][-1]}, line {parts[1]}".removeprefix(", ")


def _derived(jaxpr: Any, equation: Any) -> str:
    """The name of an operation of a derivative, by what is derived at the same place."""
    name: str = equation.primitive.name
    place = source_info_util.summarize(equation.source_info)
    for other in jaxpr.eqns:
        if other is equation:
            break
        same = source_info_util.summarize(other.source_info) == place
        if same and other.primitive.name in _SINGULAR:
            name = other.primitive.name
            break
    return f"backward of {name}"


def small_numbers(jaxpr: Any) -> Iterator[tuple[str, float]]:
    """Numbers that are added, and that float16 rounds to few digits or to 0, by their module."""
    for nested in _equations(jaxpr):
        if nested[-1].primitive.name in _ADDING:
            for atom in nested[-1].invars:
                if isinstance(atom, Literal) and np.ndim(atom.val) == 0:
                    value = abs(float(atom.val))
                    if 0 < value < _SMALL:
                        yield _module(nested), value


# --- Arrays -------------------------------------------------------------------------------------


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _flags(value: Any) -> Flags:
    if not _is_float(value) or not np.size(value):
        return Flags()
    numbers = np.asarray(value)
    return Flags(bool(np.isnan(numbers).any()), bool(np.isinf(numbers).any()))


def _is_mask(value: Any) -> bool:
    """Whether an array is 0 where it is not minus infinity."""
    return bool(((value == 0) | (value == -math.inf)).all())


def _largest(array: Any) -> float:
    """The largest finite magnitude in an array; 0 if there is none."""
    return float(np.abs(np.nan_to_num(array, nan=0, posinf=0, neginf=0)).max(initial=0))


def _wide(equation: Any, given: Sequence[Any]) -> float | None:
    """The largest magnitude that an equation computes in float64; None if not finite."""

    def wider(value: Any) -> Any:
        is_dtype = isinstance(value, np.dtype) and value in _FLOATS
        return np.dtype(np.float64) if is_dtype else value

    # Its place in earlier releases.
    enable: Any = getattr(jax, "enable_x64", None)
    enable = jax.experimental.enable_x64 if enable is None else enable
    params: Mapping[str, Any] = {name: wider(value) for name, value in equation.params.items()}
    with contextlib.suppress(Exception), enable(True):
        inputs = [
            jnp.asarray(np.asarray(each, np.float64)) if _is_float(each) else each for each in given
        ]
        made = equation.primitive.bind(*inputs, **params)
        arrays = [np.asarray(each) for each in (made if isinstance(made, list) else [made])]
        finite = all(np.isfinite(each).all() for each in arrays)
        return max(map(_largest, arrays)) if finite else None
    # Not every equation exists in every dtype.
    return None if equation.primitive.name in _SINGULAR else math.inf

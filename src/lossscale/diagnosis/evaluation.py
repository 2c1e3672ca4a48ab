"""Follows infinities and NaN through a pass that is evaluated operation by operation."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lossscale.monitoring.explanation import LARGEST, FailedOperation, Origin
from lossscale.monitoring.origins import Flags, is_harmed, overflow_in, passed_on

SMALL = 2.0**-14
"""The smallest float16 number with all digits."""
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CASTS = ("convert_element_type", "Cast")
_ADDING = ("add", "max", "clamp", "AddV2", "Add", "Maximum", "BiasAdd")
_SINGULAR = ("div", "reciprocal", "inv", "sqrt", "log", "pow", "acos", "asin", "atanh")
"""Parts of the names of operations that may have no finite result for finite numbers."""


class Call(NamedTuple):
    """A call of an operation.

    Attributes:
        name: The name of the operation.
        module: The path of its module.
        in_backward: Whether it is in the backward pass.
        sets: Whether the program gives it an infinity.
        compute: Returns its results for other inputs.
        widened: Does the same in float64; it may raise.
    """

    name: str
    module: str
    in_backward: bool
    sets: bool
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    widened: Callable[[Sequence[Any]], Sequence[Any]]


class Evaluation:
    """The origins of what is not finite in one pass.

    Args:
        weights: Names of the parameters by the ids of their values.

    Attributes:
        small: The small numbers that are added, by module; see `Watched`.
        hidden: The origin of the first overflow that makes a result wrong, and finite.
        absorbed: The origins of overflows that end in the forward pass.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        self._weights, self._in_float16 = weights, False
        self.small: dict[str, float] = {}
        self.hidden: Origin | None = None
        self.absorbed: set[Origin] = set()

    def origins(
        self,
        call: Call,
        given: Sequence[Any],
        taken: Sequence[Origin | None],
        made: Sequence[Any],
    ) -> list[Origin | None]:
        """Returns the origins of the results of a call that are not finite.

        Args:
            call: The call.
            given: Its inputs.
            taken: The origins of those that are not finite.
            made: Its results.
        """
        for each in given if call.name in _ADDING else ():
            if is_float(each) and np.ndim(each) == 0 and 0 < abs(float(each)) < SMALL:
                self.small[call.module] = abs(float(each))
        self._in_float16 |= any(re.search(r"\bfloat16", _dtype(each)) for each in made)
        infinite = [
            (origin, flags_of(each))
            for origin, each in zip(taken, given, strict=True)
            if origin is not None
        ]
        flags = list(map(flags_of, made))
        if infinite and not call.in_backward and not any(map(any, flags)):
            self._note_harm(call, given, made, overflow_in(infinite))
        return [self._origin(call, given, infinite, each) if any(each) else None for each in flags]

    def _note_harm(
        self, call: Call, given: Sequence[Any], made: Sequence[Any], overflow: Origin | None
    ) -> None:
        """Notes an overflow that ends here, and whether another number is made of 65,504."""
        if overflow is None:
            return
        self.absorbed.add(overflow)
        for one, other in zip(made, call.compute(list(map(_bounded, given))), strict=True):
            if is_float(one):
                wide = np.asarray(other, np.float64)
                if is_harmed(largest(np.asarray(one, np.float64) - wide), largest(wide)):
                    self.hidden = self.hidden or overflow

    def _origin(
        self,
        call: Call,
        given: Sequence[Any],
        infinite: Sequence[tuple[Origin, Flags]],
        made: Flags,
    ) -> Origin:
        old = passed_on(infinite, made, sets=call.sets, in_backward=call.in_backward)
        if old is not None:
            return old
        is_cast = call.name in _CASTS
        floats = [np.asarray(each, np.float64) for each in given if is_cast or is_float(each)]
        decisive = (floats[1:] or floats) if "div" in call.name.lower() else floats[:1]
        return Origin(
            FailedOperation(
                call.name,
                call.module,
                call.in_backward,
                largest_input=max(map(largest, floats), default=0.0),
                largest_result=largest(floats[0]) if is_cast else _in_float64(call, given),
                meets_zero=any((each == 0).any() for each in decisive),
                meets_negative=any((each < 0).any() for each in decisive),
                of_infinities=bool(infinite),
                cast_of=self._weights.get(id(given[0]), "") if is_cast else "",
                is_cast=is_cast,
                in_float16=self._in_float16,
            )
        )


def _in_float64(call: Call, given: Sequence[Any]) -> float | None:
    """The largest magnitude that a call computes in float64; None if not finite."""
    with contextlib.suppress(Exception):
        made = [np.asarray(each) for each in call.widened(given) if is_float(each)]
        finite = all(np.isfinite(each).all() for each in made)
        return max(map(largest, made), default=0.0) if finite else None
    # Not every operation exists in every dtype.
    return None if any(part in call.name.lower() for part in _SINGULAR) else math.inf


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", type(value)))


def is_float(value: Any) -> bool:
    """Whether a value is an array of floating-point numbers."""
    return re.search(r"float\d\d|'float'", _dtype(value)) is not None


def flags_of(value: Any) -> Flags:
    """The kinds of non-finite numbers in a value."""
    if not is_float(value):
        return Flags()
    array = np.asarray(value)
    return Flags(bool(np.isnan(array).any()), bool(np.isinf(array).any()))


def origin_of(value: Any, name: str = "", *, is_weight: bool = False) -> Origin | None:
    """Returns the origin of a value that a pass starts with; None if it is finite."""
    if not any(flags_of(value)):
        return None
    array = np.asarray(value)
    is_mask = not name or bool(((array == 0) | (array == -math.inf)).all())
    return Origin(name=name, is_weight=is_weight, is_mask=is_mask and not is_weight)


def line_of(frames: Iterable[tuple[str, int, str]]) -> str:
    """The line of the program, outside of installed packages, in words; "" if there is none.

    Args:
        frames: The file, the line and the name of the function, of each call, the innermost first.
    """
    for file, line, function in frames:
        if not file.startswith(_HERE) and "site-packages" not in file:
            names = [name for name in function.split(".<locals>.") if name != "<lambda>"]
            return f"{['', *names][-1]}, line {line}".removeprefix(", ")
    return ""


def _bounded(value: Any) -> Any:
    """A value with the largest number of float16 in place of infinities."""
    if not any(flags_of(value)):
        return value
    return np.nan_to_num(np.asarray(value), nan=math.nan, posinf=LARGEST, neginf=-LARGEST)


def largest(array: Any) -> float:
    """The largest finite magnitude in an array; 0 if there is none."""
    return float(np.abs(np.nan_to_num(array, nan=0, posinf=0, neginf=0)).max(initial=0))

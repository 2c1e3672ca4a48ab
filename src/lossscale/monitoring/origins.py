"""Origins of the infinities and NaN of a pass, by rules that hold in every framework."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossscale.errors import LossScaleError, first_line
from lossscale.framework_types import Array
from lossscale.monitoring.explanation import (
    LARGEST,
    LARGEST_OF_FLOAT64,
    SMALLEST,
    Facts,
    FailedOperation,
    Origin,
    halvings_until,
    most_halvings,
)

_SMALL = 2.0**-14
"""The smallest float16 number with all digits."""
_HARM = 2.0**-8
"""The share of a loss by which it must differ to be wrong: more than the rounding of a pass."""
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ADDING = ("add", "addv2", "biasadd", "clamp", "clamp_min", "max", "maximum")
_CASTS = ("convert_element_type", "Cast", "_to_copy", "copy_")
_SETTERS = (
    *("full", "full_like", "new_full", "fill_", "fill", "scalar_tensor", "masked_fill_"),
    *("masked_fill", "where", "constant_pad_nd", "lift_fresh", "lift_fresh_copy"),
    *("Const", "Fill", "BroadcastTo", "Select", "SelectV2", "PadV2"),
)
"""Operations that may put an infinity of the program into an array."""
_KEEPING = (*_CASTS, "t", "transpose", "permute", "view", "detach", "alias", "reshape")
"""Operations whose result has the numbers of their input."""
_GROWING = ("exp", "sinh", "cosh", "prod", "mul", "square")
"""Parts of the names of operations that overflow in float64, too."""
_DIVIDING = ("div", "rem", "mod")
_SINGULAR = ("div", "reciprocal", "inv", "sqrt", "log", "pow", "acos", "asin", "atanh")
"""Parts of the names of operations that may have no finite result for finite numbers."""


Origins: TypeAlias = Sequence[Origin | None]
"""Of several arrays: None for each that is finite, or that the program has set."""
Value: TypeAlias = tuple[Array, Origin | None]
"""An array and its origin."""


class UnrepeatableError(RuntimeError):
    """Raised in place of a message to another process, and of what cannot be put back."""


class Flags(NamedTuple):
    """The kinds of non-finite numbers in an array."""

    nan: bool = False
    infinity: bool = False


class Watched(NamedTuple):
    """The origins of what is not finite in a pass; None if all of it is finite.

    Attributes:
        loss: Of the loss.
        gradients: Of the first gradient.
        hidden: Of the first overflow that makes a result wrong, and finite.
        small: Numbers that are added, and that float16 rounds to few digits or to 0, by module.
    """

    loss: Origin | None
    gradients: Origin | None
    hidden: Origin | None = None
    small: Mapping[str, float] = {}

    @property
    def is_finite(self) -> bool:
        """Whether everything is finite."""
        return self.loss is None and self.gradients is None


class Call(NamedTuple):
    """A call of an operation.

    Attributes:
        name: The name of the operation.
        shown: The name for texts.
        module: The path of its module, or the line of the program if it is in none.
        in_backward: Whether it is in the backward pass.
        sets: Whether the program gives it an infinity.
        widened: Computes its results again, in float64, from what a function returns for each of
            its inputs; it may raise.
        numbers: The numbers that it takes beside arrays.
    """

    name: str
    shown: str
    module: str
    in_backward: bool
    sets: bool
    widened: Callable[[Callable[[Array], Array]], Sequence[Array]]
    numbers: Sequence[float] = ()


class Evaluation:
    """The origins of what is not finite in one pass, whose operations are called one by one.

    Args:
        name_of: Returns the name of the parameter that a value is; "" if it is none.

    Attributes:
        constants: The constants of the program, and what it computes from them alone, by their ids.
        small: The small numbers that are added, by module; see `Watched`.
        absorbed: The origins of overflows that end in the forward pass.
        first: The first origin that is an operation; None if there is none.
    """

    def __init__(self, name_of: Callable[[Array], str]) -> None:
        self._name_of, self._in_float16 = name_of, False
        self._makers: dict[int, str] = {}
        # The parameters that a value has the numbers of, such as the transpose of one in float16.
        self._same_as: dict[int, tuple[str, Array]] = {}
        # What is wrong because of an overflow, what it would be without one, and the origin of it.
        self._overflows: dict[int, tuple[Array, Array, Origin]] = {}
        self._hidden: Origin | None = None
        self.constants: dict[int, Array] = {}
        self.small: dict[str, float] = {}
        self.absorbed: set[Origin] = set()
        self.first: Origin | None = None

    def origins(
        self, call: Call, given: Sequence[Array], taken: Origins, made: Sequence[Array]
    ) -> list[Origin | None]:
        """Returns the origins of the results of a call that are not finite.

        Args:
            call: The call.
            given: Its inputs.
            taken: Their origins; None for those that are finite, or that the program has set.
            made: Its results.
        """
        constant = [each for each in given if id(each) in self.constants]
        if len(constant) == len(given) and (given or call.name == "Const"):
            self.constants.update((id(each), each) for each in made)
        if call.name.lower().rstrip("_") in _ADDING:
            # What is added in float32 is not rounded to 0.
            is_rounded = not call.in_backward and any(map(_is_float16, given[:1]))
            numbers = call.numbers if is_rounded else ()
            scalars = (each for each in constant if is_float(each) and np.ndim(each) == 0)
            for each in (*numbers, *scalars):
                if 0 < abs(float(each)) < _SMALL:
                    self.small[call.module] = abs(float(each))
        self._in_float16 |= any(map(_is_float16, made))
        maker = FailedOperation(call.shown, call.module).where
        self._makers |= dict.fromkeys(map(self.key_of, made), maker)
        if call.name in _KEEPING and given and (name := self._parameter(given[-1])):
            self._same_as |= {self.key_of(each): (name, each) for each in made}
        flags = list(map(self.flags_of, made))
        is_finite = not any(map(any, flags))
        infinite = []
        for origin, each in zip(taken, given, strict=True):
            kinds = self.flags_of(each) if origin or not is_finite else Flags()
            # A list of tensors in a graph of TensorFlow has no numbers itself.
            if any(kinds) or (origin and not is_float(each)):
                infinite.append((origin or Origin(is_mask=True), kinds))
        found = [
            self._origin(call, given, infinite, made, each) if any(each) else None for each in flags
        ]
        self.first = self.first or next((each for each in found if each and each.failed), None)
        known = (self._overflows.get(self.key_of(each)) for each in given)
        overflows = [origin for _, _, origin in filter(None, known)]
        overflows += (each for each in found if each and each.failed and each.failed.is_overflow)
        wrong = []
        if overflows and not call.in_backward:
            wrong = self._made_wrong(overflows[0], call, made, is_finite)
        for each in made:
            self.forget(each)
        for one, other in wrong:
            self.remember(one, other, overflows[0])
        return found

    def hidden_in(self, outputs: Iterable[Array]) -> Origin | None:
        """The origin of an overflow that makes outputs wrong; None if there is none."""
        for each in outputs:
            entry = self._overflows.get(self.key_of(each))
            if entry and self.is_wrong(each, self.without_overflow(each), _HARM):
                return entry[2]
        return self._hidden

    def watched(
        self, outputs: Iterable[Array], loss: Origin | None, gradients: Origin | None = None
    ) -> Watched:
        """Returns the origins of outputs and of a gradient, with what else was seen."""
        return Watched(loss, gradients, self.hidden_in(outputs), self.small)

    def watched_until(self, error: Exception) -> Watched:
        """Returns the first origin before an exception, such as that of a check; else raises it."""
        if self.first is None or isinstance(error, (LossScaleError, UnrepeatableError)):
            raise error
        in_backward = self.first.failed is not None and self.first.failed.in_backward
        loss, gradients = (None, self.first) if in_backward else (self.first, None)
        return Watched(loss, gradients, small=self.small)

    def origin_of(self, value: Array, name: str = "", *, is_weight: bool = False) -> Origin | None:
        """Returns the origin of a value that a pass starts with; None if it is finite."""
        if not any(self.flags_of(value)):
            return None
        array = self.on_host(value)
        is_mask = not name or bool(((array == 0) | (array == -math.inf)).all())
        return Origin(name=name, is_weight=is_weight, is_mask=is_mask)

    # What arrays of other libraries than NumPy override.

    def key_of(self, value: Array) -> int:
        """The key of a value, which no other has while it lives."""
        return id(value)

    def on_host(self, value: Array) -> NDArray[np.float64]:
        """A value as a NumPy array of float64."""
        return np.asarray(value, np.float64)

    def flags_of(self, value: Array) -> Flags:
        """The kinds of non-finite numbers in a value."""
        if not is_float(value):
            return Flags()
        array = np.asarray(value)
        return Flags(bool(np.isnan(array).any()), bool(np.isinf(array).any()))

    def without_overflow(self, value: Array) -> Array:
        """A value as it would be without the overflows that it was computed from, in float64."""
        entry = self._overflows.get(self.key_of(value))
        return entry[1] if entry else value

    def rounded(self, other: Array, like: Array) -> Array:
        """A value in float64, rounded as another one is if its dtype can hold it."""
        other, dtype = np.asarray(other, np.float64), np.asarray(like).dtype
        with np.errstate(over="ignore"):
            narrow = other.astype(dtype).astype(np.float64)
        return np.where(np.isfinite(narrow), narrow, other)

    def is_wrong(self, one: Array, other: Array, tolerance: float = 0.0) -> bool:
        """Whether a value differs from another one by more than a share of its largest number."""
        one, other = self.on_host(one), self.on_host(other)
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        difference = np.where(same, 0, np.nan_to_num(np.abs(one - other), nan=np.inf))
        return bool(difference.max(initial=0) > tolerance * largest(other))

    def remember(self, one: Array, other: Array, origin: Origin) -> None:
        """Remembers what a value would be without an overflow."""
        self._overflows[self.key_of(one)] = one, other, origin

    def forget(self, value: Array) -> None:
        """Forgets it: a new value is there."""
        self._overflows.pop(self.key_of(value), None)

    def _made_wrong(
        self, origin: Origin, call: Call, made: Sequence[Array], is_finite: bool
    ) -> list[tuple[Array, Array]]:
        """Returns the results that an overflow makes wrong, each with what it is without one."""
        wrong = []
        if is_finite:
            self.absorbed.add(origin)
        try:
            for one, other in zip(made, call.widened(self.without_overflow), strict=True):
                # A list of TensorFlow shows its numbers once an operation takes them out.
                is_list = "variant" in _dtype(one)
                if is_float(one):
                    other = self.rounded(other, one)
                if is_list or (is_float(one) and self.is_wrong(one, other)):
                    wrong.append((one, other))
        # Such as an operation that draws random numbers; of some, only the shape counts.
        except Exception:
            if is_finite and not call.name.endswith("_like"):
                self._hidden = self._hidden or origin
        return wrong

    def _origin(
        self,
        call: Call,
        given: Sequence[Array],
        infinite: Sequence[tuple[Origin, Flags]],
        results: Sequence[Array],
        made: Flags,
    ) -> Origin:
        """The origin of a result that is not finite, of which it has the flags."""
        if old := _passed_on(call, infinite, made):
            return old._replace(place=old.place or call.module) if old.is_mask else old
        is_cast = call.name in _CASTS
        floats = [self.on_host(each) for each in given if is_cast or is_float(each)]
        # A count that a sum is divided by is an integer.
        divides = any(part in call.name.lower() for part in _DIVIDING)
        divisors = [self.on_host(each) for each in given[1:]] if divides else []
        divisors += list(map(np.asarray, call.numbers)) if divides else []
        decisive = divisors or floats[:1]
        is_narrow = any(map(_is_float16, (*given, *results)))
        # What is rounded to 0; CUDA rounds a divisor without dimensions, which may be float32.
        zero = SMALLEST / 2 if is_narrow else 0.0
        meets_zero = any((abs(each) <= zero).any() for each in decisive)
        size = largest(floats[-1]) if is_cast else self._in_float64(call, meets_zero)
        if divisors and meets_zero and size is not None and size <= LARGEST:
            size = None
        weights = (each for each in given if np.ndim(each) > 1 and self._parameter(each))
        weight = next(weights, None)
        others = [self.on_host(each) for each in given if is_float(each) and each is not weight]
        failed = FailedOperation(
            call.shown,
            call.module,
            call.in_backward,
            largest_input=max(map(largest, floats if weight is None else others), default=0.0),
            largest_result=size,
            meets_zero=meets_zero,
            meets_negative=any((each < 0).any() for each in decisive),
            of_infinities=bool(infinite),
            cast_of=self._name_of(given[-1]) if is_cast else "",
            is_cast=is_cast,
            maker=self._makers.get(self.key_of(given[-1]), "") if is_cast else "",
            is_narrow=is_narrow,
            divisor=self._divisor(call, given) if divides and not call.in_backward else 0.0,
            weight="" if weight is None else self._parameter(weight),
            largest_weight=0.0 if weight is None else largest(self.on_host(weight)),
            in_float16=self._in_float16,
        )
        is_beyond = any(origin.is_beyond for origin, _ in infinite)
        return Origin(failed, is_beyond=is_beyond)

    def _parameter(self, value: Array) -> str:
        """The name of the parameter that has the numbers of a value; "" if none has."""
        known = self._same_as.get(self.key_of(value))
        return self._name_of(value) or (known[0] if known else "")

    def _divisor(self, call: Call, given: Sequence[Array]) -> float:
        """The number that a call divides by; 0 if there are several."""
        divisors: list[Array] = [*call.numbers, *map(self.on_host, filter(is_float, given[1:2]))]
        return abs(float(divisors[0])) if len(divisors) == 1 and np.size(divisors[0]) == 1 else 0.0

    def _in_float64(self, call: Call, meets_zero: bool) -> float | None:
        """The largest magnitude that a call computes in float64, as in `FailedOperation`."""
        with contextlib.suppress(Exception):
            widened = call.widened(lambda value: value)
            made = [self.on_host(each) for each in widened if is_float(each)]
            if all(np.isfinite(each).all() for each in made):
                return max(map(largest, made), default=0.0)
            is_power = "pow" in call.name.lower() and not meets_zero
            grows = is_power or any(part in call.name.lower() for part in _GROWING)
            is_nan = any(np.isnan(each).any() for each in made)
            return LARGEST_OF_FLOAT64 if grows and not is_nan else None
        # Not every operation exists in every dtype.
        return None if any(part in call.name.lower() for part in _SINGULAR) else math.inf


def _passed_on(call: Call, taken: Sequence[tuple[Origin, Flags]], made: Flags) -> Origin | None:
    """Returns the origin of what an operation only passes on; None if it makes something new."""
    real = [origin for origin, _ in taken if not origin.is_mask]
    if real:
        # A skipped step may have left NaN in statistics, which a norm takes but does not read.
        return next((origin for origin in real if origin.failed is not None), real[0])
    if call.sets or (call.name in _SETTERS and not taken):
        return Origin(is_mask=True, is_beyond=bool(call.numbers) and not call.sets)
    if taken and not call.in_backward and (not made.nan or any(flags.nan for _, flags in taken)):
        return taken[0][0]
    return None


def _dtype(value: object) -> str:
    return str(getattr(value, "dtype", type(value)))


def _is_float16(value: object) -> bool:
    return re.search(r"\bfloat16", _dtype(value)) is not None


def is_float(value: object) -> bool:
    """Whether a value is an array of floating-point numbers."""
    return re.search(r"float\d\d|'float'", _dtype(value)) is not None


def line_of(frames: Iterable[tuple[str, int, str]]) -> str:
    """The line of the program, outside of installed packages, in words.

    "loss" for what this library does with the loss; "" if there is no line.

    Args:
        frames: The file, the line and the name of the function, of each call, the innermost first.

    Examples:
        >>> line_of([("site-packages/torch/functional.py", 7, "norm"), ("train.py", 30, "loss_fn")])
        'loss_fn, line 30'
    """
    for file, line, function in frames:
        if file.startswith(_HERE):
            return "loss"
        if "site-packages" not in file:
            # TensorFlow has no name for a lambda that it traces as a function.
            names = [name for name in function.split(".<locals>.") if name and name[0] != "<"]
            place = f"line {line}"
            return f"{names[-1]}, {place}" if names else f"{place} of {os.path.basename(file)}"
    return ""


def largest(array: NDArray[np.float64]) -> float:
    """The largest finite magnitude in an array; 0 if there is none."""
    return float(np.abs(np.nan_to_num(array, nan=0, posinf=0, neginf=0)).max(initial=0))


def explain_pass(
    watch: Callable[[float], Watched],
    scale: float,
    in_float32: Callable[[float], Watched] | None = None,
) -> Facts:
    """Returns what is not finite in a pass, and why.

    Args:
        watch: Computes the pass at a loss scale, and watches it.
        scale: The loss scale.
        in_float32: Does the same in float32; None if the program cannot set a number above the
            largest float16 number, and the watch sees small numbers before they are rounded.
    """

    @functools.cache
    def after(halvings: int) -> Watched:
        return watch(scale * 2.0**-halvings)

    @functools.cache
    def wide() -> Watched:
        # If there is nothing to compare with, all of it counts as not finite.
        return Watched(Origin(), None) if in_float32 is None else in_float32(scale)

    def with_epsilon(origin: Origin) -> Origin:
        if origin.failed is None:
            return origin
        small = {**found.small, **wide().small}
        epsilon = small.get(origin.failed.module, 0.0)
        return origin._replace(failed=origin.failed._replace(epsilon=epsilon))

    found = after(0)
    # Without the first two, nothing is skipped. What is hidden makes the step wrong.
    origin = found.loss or found.gradients
    if origin is None:
        hidden = found.hidden and with_epsilon(found.hidden)
        return Facts(hidden, is_hidden=hidden is not None, scale=scale)
    if origin.is_mask or (origin.failed is not None and origin.failed.of_infinities):
        in_float16 = origin.failed is None or origin.failed.is_of_float16
        is_finite = in_float16 and wide().is_finite and wide().hidden is None
        is_beyond = origin.is_beyond or is_finite
        return Facts(with_epsilon(origin)._replace(is_beyond=is_beyond), scale=scale)
    if found.loss is not None or origin.failed is None or not origin.failed.in_backward:
        # Such as a division by a number that is 0 because of an overflow.
        hidden = found.hidden if found.hidden != origin else None
        return Facts(with_epsilon(origin), hidden=hidden, scale=scale)
    halvings = halvings_until(lambda halvings: after(halvings).is_finite, scale)
    lowest = after(most_halvings(scale)).gradients
    if lowest is not None and lowest.failed is not None:
        # An operation that overflows at this scale may precede one that fails at every scale.
        origin = lowest
    origin = with_epsilon(origin) if halvings is None else origin
    last = after(halvings - 1).gradients if halvings else None
    where = last.failed.where if last and last.failed else ""
    return Facts(origin, hidden=found.hidden, scale=scale, halvings=halvings, last=where)


def facts_in_float16(facts: Callable[[bool], Facts]) -> Facts:
    """Returns the facts of a pass in float16, or why there are none if only float16 raises.

    Args:
        facts: Returns the facts of a pass in float16 if called with True, otherwise in float32.
    """
    try:
        return facts(True)
    except LossScaleError:
        raise
    # Frameworks and models raise many kinds of exceptions if float16 is not what they expect.
    except Exception as error:
        # Otherwise the program is wrong, and its author should see it.
        facts(False)
        line = f"{type(error).__name__}: {first_line(error, 200)}"
        return Facts(why_not=f"the model does not run in float16 here: {line}")

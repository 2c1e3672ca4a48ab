"""Origins of the infinities and NaN of a pass, by rules that hold in every framework."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossscale.errors import LossScaleError
from lossscale.explain.text import (
    LARGEST,
    LARGEST_OF_FLOAT64,
    NEAR,
    SMALLEST,
    Explanation,
    Failure,
    Origin,
    explained,
)
from lossscale.framework_types import Array

_SMALL = 2.0**-14
"""The smallest float16 number with all digits."""
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
"""Parts of the paths of code that is not the program's."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations of all frameworks, in lower case and without a `_` at the end.
_CASTS = _names("_to_copy copy cast convert_element_type")
_SETTERS = _names(
    "full full_like new_full fill scalar_tensor masked_fill where constant_pad_nd lift_fresh "
    "lift_fresh_copy const broadcastto select selectv2 padv2"
)
"""They may put an infinity of the program into an array."""
_ADDING = _names("add addv2 biasadd clamp clamp_min max maximum")
"""They may add an epsilon."""
_DIVIDING = _names(
    "div divnonan floordiv floormod fmod mod realdiv rem remainder truncatemod xdivy xlogy"
)
"""They divide by a later argument, or take its logarithm."""
_SINGULAR = _DIVIDING | _names(
    "cbrt integer_pow inv invgrad log log2 log10 pow reciprocal reciprocalgrad rsqrt rsqrtgrad "
    "sqrt sqrtgrad"
)
"""An epsilon keeps their input away from 0, where they are singular or have no result."""
# Parts of the names of others.
_NORMS = ("batch_norm", "batchnorm", "layer_norm", "group_norm", "weight_norm", "rms_norm")
_LOSSES = {"ctc": Failure.LONG_LABEL, "nll_loss": Failure.IGNORED}
_RANGED = ("acos", "asin", "atanh", "erfinv", "erf_inv", "log1p", "logit")
_GROWING = ("exp", "sinh", "cosh", "prod", "mul", "square")
"""They overflow in float64, too."""

Value: TypeAlias = tuple[Array, Origin | None]
"""An array and its origin."""


class UnrepeatableError(LossScaleError):
    """Raised in place of a message to another process, and of drawing other random numbers."""


class Flags(NamedTuple):
    """The kinds of non-finite numbers in an array."""

    nan: bool = False
    infinity: bool = False


class Watched(NamedTuple):
    """The origins of what is not finite in a pass; None if all of it is finite.

    Attributes:
        loss: Of the loss.
        gradients: Of the first gradient.
        hidden: The first overflow of the forward pass whose result a later operation made finite.
        small: Numbers that are added, and that float16 rounds to few digits or to 0, by module.
    """

    loss: Origin | None
    gradients: Origin | None
    hidden: Origin | None = None
    small: Mapping[str, float] = {}


class Call(NamedTuple):
    """A call of an operation.

    Attributes:
        name: The name of the operation.
        shown: The name for texts.
        module: The path of its module, or the line of the program if it is in none.
        in_backward: Whether it is in the backward pass.
        widened: Computes its results again, in float64; it may raise.
        numbers: The numbers that it takes beside arrays.
    """

    name: str
    shown: str
    module: str
    in_backward: bool
    widened: Callable[[], Sequence[Array]]
    numbers: Sequence[float] = ()


class Evaluation:
    """The origins of what is not finite in one pass, whose operations are called one by one.

    Attributes:
        constants: The constants of the program, and what it computes from them alone, by their ids.
        small: The small numbers that are added, by module; see `Watched`.
        absorbed: The overflows that end in the forward pass, in order.
        first: The first origin that is an operation; None if there is none.
    """

    def __init__(self) -> None:
        self._in_float16 = False
        # In words, by its memory and the place in it; a result by its memory alone.
        self._sources: dict[object, str] = {}
        self.constants: dict[int, Array] = {}
        self.small: dict[str, float] = {}
        self.absorbed: dict[Origin, None] = {}
        self.first: Origin | None = None

    def evaluated(
        self,
        named: Iterable[tuple[Array, str, bool]],
        evaluate: Callable[[list[Value]], Sequence[Value]],
    ) -> Watched:
        """Evaluates a program that is one list of operations.

        Args:
            named: What it is given: arrays, their names, and whether each is a parameter.
            evaluate: Returns its results: a loss and gradients.
        """
        given = [(each, self.origin_of(each, name, is_weight=kind)) for each, name, kind in named]

        def watched() -> Watched:
            (_, loss), *gradients = evaluate(given)
            return self.watched(loss, next((o for _, o in gradients if o and not o.is_set), None))

        return self.until_error(watched)

    def origins(
        self, call: Call, inputs: Sequence[Value], made: Sequence[Array]
    ) -> list[Origin | None]:
        """Returns the origins of the results of a call that are not finite.

        Args:
            call: The call.
            inputs: Its inputs, and their origins; None for those that are finite, or that the
                program has set.
            made: Its results.
        """
        given = [each for each, _ in inputs]
        constant = [each for each in given if id(each) in self.constants]
        if len(constant) == len(given) and (given or call.name == "const"):
            self.constants.update((id(each), each) for each in made)
        if call.name in _ADDING:
            # What is added in float32 is not rounded to 0.
            is_rounded = not call.in_backward and any(map(_is_float16, given[:1]))
            numbers = call.numbers if is_rounded else ()
            scalars = (each for each in constant if is_float(each) and np.ndim(each) == 0)
            for each in (*numbers, *scalars):
                if 0 < abs(float(each)) < _SMALL:
                    self.small[call.module] = abs(float(each))
        self._in_float16 |= any(map(_is_float16, made))
        maker = Origin(Failure.OTHER, call.shown, call.module).where
        self._sources |= {self.place_of(each)[0]: f"the result of {maker}" for each in made}
        flags = list(map(self.flags_of, made))
        is_finite = not any(map(any, flags))
        infinite = []
        for each, origin in inputs:
            kinds = self.flags_of(each) if origin or not is_finite else Flags()
            # A list of tensors in a graph of TensorFlow has no numbers itself.
            if any(kinds) or (origin and not is_float(each)):
                infinite.append((origin or Origin(Failure.SET), kinds))
        found = [
            self._origin(call, given, infinite, made, each) if any(each) else None for each in flags
        ]
        self.first = self.first or next((o for o in found if o and o.is_operation), None)
        if is_finite and infinite and made and not call.in_backward and any(map(is_float, made)):
            self.absorbed |= dict.fromkeys(o for o, _ in infinite if o.is_overflow)
        return found

    def watched(self, loss: Origin | None, gradients: Origin | None = None) -> Watched:
        """Returns the origins of a loss and of a gradient, with what else was seen."""
        return Watched(loss, gradients, next(iter(self.absorbed), None), self.small)

    def until_error(self, watched: Callable[[], Watched]) -> Watched:
        """Watches a pass; of one that raises, as by a check, the first origin before that counts.

        Without an origin, the exception is raised.
        """
        try:
            return watched()
        except Exception as error:
            calls = traceback.walk_tb(error.__traceback__)
            if any(frame.f_code is Evaluation.origins.__code__ for frame, _ in calls):
                raise LossScaleError(
                    "explain() itself failed, which says nothing of the model. Please report it, "
                    "with the exception above."
                ) from error
            if self.first is None or isinstance(error, LossScaleError):
                raise
            loss, gradients = (None, self.first) if self.first.in_backward else (self.first, None)
            return Watched(loss, gradients, small=self.small)

    def origin_of(self, value: Array, name: str = "", *, is_weight: bool = False) -> Origin | None:
        """Returns the origin of a value that a pass starts with; None if it is finite."""
        if is_weight:
            self._sources[self.place_of(value)] = f"the parameter {name}"
        if not any(self.flags_of(value)):
            return None
        array = self.on_host(value)
        if not name or ((array == 0) | (array == -math.inf)).all():
            return Origin(Failure.SET)
        if is_weight:
            return Origin(Failure.WEIGHT, module=name, in_float16=False)
        return Origin(Failure.ARGUMENT, name, in_float16=False)

    # What arrays of other libraries than NumPy override.

    def place_of(self, value: Array) -> tuple[int, int]:
        """The memory of a value, which no other has while it lives, and the place in it."""
        return id(value), 0

    def on_host(self, value: Array) -> NDArray[np.float64]:
        """A value as a NumPy array of float64."""
        return np.asarray(value, np.float64)

    def flags_of(self, value: Array) -> Flags:
        """The kinds of non-finite numbers in a value."""
        if not is_float(value):
            return Flags()
        array = np.asarray(value)
        return Flags(bool(np.isnan(array).any()), bool(np.isinf(array).any()))

    def _origin(
        self,
        call: Call,
        given: Sequence[Array],
        infinite: Sequence[tuple[Origin, Flags]],
        results: Sequence[Array],
        made: Flags,
    ) -> Origin:
        """The origin of a result that is not finite, of which it has the flags."""
        if old := self._passed_on(call, infinite, made):
            return old._replace(module=old.module or call.module) if old.is_set else old
        is_cast = call.name in _CASTS
        floats = [self.on_host(each) for each in given if is_cast or is_float(each)]
        divisors = []
        if call.name in _DIVIDING:
            # A count that a sum is divided by is an integer.
            divisors = [*map(self.on_host, given[1:]), *map(np.asarray, call.numbers)]
        inputs = divisors or floats[:1]
        is_narrow = any(map(_is_float16, (*given, *results)))
        # What is rounded to 0; CUDA rounds a divisor without dimensions, which may be float32.
        zero = SMALLEST / 2 if is_narrow else 0.0
        meets_zero = any((abs(each) <= zero).any() for each in inputs)
        size = largest(floats[-1]) if is_cast else self._in_float64(call, meets_zero)
        if divisors and meets_zero and size is not None and size <= LARGEST:
            size = None
        place = self.place_of(given[-1]) if is_cast else (0, 0)
        if any(origin.failure is Failure.BEYOND for origin, _ in infinite):
            failure = Failure.BEYOND
        elif infinite:
            failure = Failure.MASKED
        elif is_cast:
            failure = Failure.CAST
        else:
            result = self.on_host(next(each for each in results if any(self.flags_of(each))))
            failure = self._failure(call, inputs, result, size)
        return Origin(
            failure,
            call.shown,
            call.module,
            call.in_backward,
            largest_input=max(map(largest, floats), default=0.0),
            largest_result=size,
            source=self._sources.get(place) or self._sources.get(place[0], "a number"),
            is_narrow=is_narrow,
            in_float16=self._in_float16,
        )

    def _failure(
        self,
        call: Call,
        inputs: Sequence[NDArray[np.float64]],
        result: NDArray[np.float64],
        size: float | None,
    ) -> Failure:
        """Why a result is not finite, given what may be 0 and the largest result in float64."""
        name, is_singular = call.name, call.name in _SINGULAR
        is_small = is_singular and any(_is_small(each, ~np.isfinite(result)) for each in inputs)
        if size is not None:
            # A derivative of them, at any scale.
            of_them = call.shown.removeprefix("backward of ") in _SINGULAR
            is_small |= call.in_backward and of_them
            return Failure.SMALL_INPUT if is_small else Failure.TOO_LARGE
        if not any(each.size for each in inputs):
            return Failure.NOTHING
        if lost := next((why for part, why in _LOSSES.items() if part in name), None):
            return lost
        if is_small or any(part in name for part in _NORMS):
            return Failure.ZERO
        is_ranged = is_singular or any(part in name for part in _RANGED)
        return Failure.OUT_OF_RANGE if is_ranged else Failure.OTHER

    def _in_float64(self, call: Call, meets_zero: bool) -> float | None:
        """The largest magnitude that a call computes in float64, as in `Origin`."""
        name = call.name
        with contextlib.suppress(Exception):
            made = [self.on_host(each) for each in call.widened() if is_float(each)]
            if all(np.isfinite(each).all() for each in made):
                return max(map(largest, made), default=0.0)
            is_power = "pow" in name and not meets_zero
            grows = is_power or any(part in name for part in _GROWING)
            is_nan = any(np.isnan(each).any() for each in made)
            return LARGEST_OF_FLOAT64 if grows and not is_nan else None
        # Not every operation exists in every dtype.
        return None if name in _SINGULAR or any(part in name for part in _RANGED) else math.inf

    def _passed_on(
        self, call: Call, taken: Sequence[tuple[Origin, Flags]], made: Flags
    ) -> Origin | None:
        """Returns the origin of what a call only passes on; None if it makes something new."""
        real = [origin for origin, _ in taken if not origin.is_set]
        if real:
            # A skipped step may have left NaN in statistics, which a norm takes but does not read.
            return next((origin for origin in real if origin.is_operation), real[0])
        sets = not all(map(math.isfinite, call.numbers))
        if sets or (call.name in _SETTERS and not taken):
            is_beyond = bool(call.numbers) and not sets
            return Origin(Failure.BEYOND if is_beyond else Failure.SET)
        if taken and not call.in_backward and (not made.nan or any(f.nan for _, f in taken)):
            return taken[0][0]
        return None


def _is_small(inputs: NDArray[np.float64], failed: NDArray[np.bool_]) -> bool:
    """Whether the numbers that an operation takes are near 0 wherever it fails."""
    with contextlib.suppress(ValueError):
        inputs = np.broadcast_to(inputs, failed.shape)[failed]
    return bool((abs(inputs) < NEAR).all())


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
        >>> installed = "/usr/lib/python3/dist-packages/torch/functional.py", 7, "norm"
        >>> line_of([installed, ("train.py", 30, "loss_fn")])
        'loss_fn, line 30'
    """
    for file, line, function in frames:
        if file.startswith(_HERE):
            return "loss"
        if not any(part in file for part in _INSTALLED):
            # TensorFlow has no name for a lambda that it traces as a function.
            names = [name for name in function.split(".<locals>.") if name and name[0] != "<"]
            place = f"line {line}"
            return f"{names[-1]}, {place}" if names else f"{place} of {os.path.basename(file)}"
    return ""


def largest(array: NDArray[np.float64]) -> float:
    """The largest finite magnitude in an array; 0 if there is none."""
    return float(np.abs(np.nan_to_num(array, nan=0, posinf=0, neginf=0)).max(initial=0))


def not_compared(_: float) -> Watched:
    """In place of a pass in float32, if there is none: all of it counts as not finite."""
    return Watched(Origin(Failure.OTHER), None)


def explain_pass(
    watch: Callable[[float], Watched],
    scale: float,
    in_float32: Callable[[float], Watched] = not_compared,
) -> Explanation:
    """Explains why a pass is not finite.

    Args:
        watch: Computes the pass at a loss scale, and watches it.
        scale: The loss scale.
        in_float32: Does the same in float32; not needed if the program cannot set a number above
            the largest float16 number, and the watch sees small numbers before they are rounded.
    """
    found = watch(scale)
    origin = found.loss or found.gradients
    hidden = None if found.hidden == origin else found.hidden
    if origin is None:
        return explained(None, hidden, scale=scale)
    if origin.failure in (Failure.SET, Failure.BEYOND, Failure.MASKED):
        # Neither a loss nor a gradient there has an origin.
        if origin.is_of_float16 and not any(in_float32(scale)[:2]):
            origin = origin._replace(failure=Failure.BEYOND)
        return explained(origin, hidden)
    if origin.in_backward:
        # An operation that overflows at this scale may precede one that fails at every scale.
        lowest = watch(min(scale, SMALLEST)).gradients
        if lowest is None:
            return explained(origin, hidden, scale=scale, is_scaled=True)
        origin = lowest if lowest.is_operation else origin
    if origin.is_operation:
        epsilons = {**found.small, **in_float32(scale).small}
        origin = origin._replace(epsilon=epsilons.get(origin.module, 0.0))
    return explained(origin, hidden)

"""Why a step was skipped, or its loss is not finite: the cause, the operation, and what to do.

A watcher of a framework finds the first operation that makes an infinity or a NaN of finite
numbers, and describes it as a `FailedOperation`. Causes and texts are the same everywhere.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

LARGEST = 65504.0
"""The largest number of float16."""
LARGEST_OF_FLOAT32 = 2.0**128
LARGEST_OF_FLOAT64 = sys.float_info.max
SMALLEST = 2.0**-24
"""The smallest one above 0; half of it, and less, is rounded to 0."""
HALVINGS = 24
"""The fewest halvings of a loss scale that are tried: 2**-24 is the smallest float16 number. From
a higher one the scale falls to 1."""

# Those whose derivatives float16 can hold, such as 1 / epsilon**2.
_ADVISED_EPSILON = {"div": 4e-3, "reciprocal": 4e-3, "rsqrt": 1e-3, "pow": 4e-3}
_ADVISED_EPSILON |= {"digamma": 4e-3, "polygamma": 4e-2}
_OTHER_EPSILON = 1e-4
_MANY_HALVINGS, _LOW = 8, 2**8
_SINGULAR = dict.fromkeys(("reciprocal", "div", "rem"), "divides by 0")
_SINGULAR |= {"rsqrt": "divides by a square root of 0", "log": "takes the logarithm of 0"}
_SINGULAR |= {"pow": "raises 0 to a negative power"}
_OF_POSITIVE = ("rsqrt", "sqrt", "log", "pow")
_BOUNDED = ("acos", "asin", "atanh", "acosh", "erfinv", "erf_inv", "log1p")
"""Operations that are not finite outside of an interval, or at its ends."""
_OF_MATRICES = ("cholesky", "linalg", "solve", "triangular", "inverse", "eigh", "svd")
"""Parts of the names of operations on matrices."""
_SAME = {"true_divide": "div", "truediv": "div", "divide": "div", "addcdiv": "div", "power": "pow"}
_SAME |= {"log2": "log", "log10": "log", "fmod": "rem", "remainder": "rem", "floormod": "rem"}
_SAME |= {"realdiv": "div", "divnonan": "div", "integer_pow": "pow", "inv": "reciprocal"}


class Cause(enum.StrEnum):
    """Why a step was skipped, or its loss is not finite.

    Attributes:
        SCALE: The forward pass is finite, and at a lower loss scale the backward pass is, too.
        FORWARD_OVERFLOW: A result of the forward pass is too large for float16.
        SINGULAR: A division by 0, the logarithm of 0, or another operation without a finite result.
        BACKWARD_OVERFLOW: The backward pass overflows at every loss scale that is tried.
        BATCH: An argument of the model contains an infinity or a NaN.
        WEIGHTS: A parameter or a buffer does.
        LOSS: The outputs of the model are finite, and the loss or its gradient is not.
        UNKNOWN: The step could not be repeated, or was finite when it was repeated.
    """

    SCALE = "scale"
    FORWARD_OVERFLOW = "forward overflow"
    SINGULAR = "singular"
    BACKWARD_OVERFLOW = "backward overflow"
    BATCH = "batch"
    WEIGHTS = "weights"
    LOSS = "loss"
    UNKNOWN = "unknown"


_AT_ANY_SCALE = (Cause.FORWARD_OVERFLOW, Cause.SINGULAR, Cause.BATCH)
_LARGE_GAIN = 8.0
"""Weights that make a result so many times larger than the input are not as they were initialized:
then it is about 1, and up to 4 if all inputs are the same."""
_GROWN = "weights that grow in training need a lower learning rate, or weight decay"
_HIDES = ", and a later operation hides it"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a step was skipped, or its loss is not finite, and what to do.

    Attributes:
        cause: The cause.
        reason: The event, as a clause.
        advice: The remedy, as a clause.
        operation: The first operation with a result that is not finite, or the argument that is
            not; "" if it is not known.
        module: The path of its module, the line if it is outside of modules, or the parameter that
            is not finite; "" if not known.
        in_backward: Whether it is an operation of the backward pass.
        halvings: Number of times the loss scale must be halved; None if no loss scale helps.
        in_float16: Whether the pass had computed in float16 by then. If not, float16 is not to
            blame.

    Examples:
        >>> print(explained(Facts(why_not="the model was compiled")))
        Not explained: the model was compiled.
    """

    cause: Cause
    reason: str
    advice: str = ""
    operation: str = ""
    module: str = ""
    in_backward: bool = False
    halvings: int | None = None
    in_float16: bool = True

    @property
    def text(self) -> str:
        """One or two sentences: what happened, and what to do."""
        named = (f"{self.module} (", f"{self.module} of the model", f"{self.operation} ")
        # A name keeps its form.
        reason = self.reason if self.reason.startswith(named) else _capital(self.reason)
        none_helps = "no loss scale helps: " if self.cause in _AT_ANY_SCALE else ""
        return f"{reason}. {_capital(none_helps + self.advice)}." if self.advice else f"{reason}."

    def __str__(self) -> str:
        return self.text


class FailedOperation(NamedTuple):
    """An operation that makes an infinity or a NaN of numbers that are finite.

    Attributes:
        operation: Its name.
        module: The path of its module or layer, or the line of the program if it is in none; "" if
            it is not known.
        in_backward: Whether it is in the backward pass.
        largest_input: The largest finite magnitude of what it takes.
        largest_result: The largest magnitude that it computes from the same numbers in float64;
            `LARGEST_OF_FLOAT64` if even this overflows, None if it is not finite for another
            reason, infinity if it cannot be computed.
        meets_zero: Whether what it divides by, or takes the logarithm or root of, contains 0.
        meets_negative: Whether that contains a negative number.
        of_infinities: Whether it takes infinities that the program sets, such as those of a mask.
        cast_of: Name of the parameter whose cast to float16 it is; "" if it is not one.
        is_cast: Whether it is a cast to float16.
        maker: The module and the operation that computed what is cast; "" if none did.
        is_narrow: Whether it takes or returns float16.
        epsilon: A small number that is added in the same module, in float16; 0 if none.
        divisor: The number that it divides by, such as a temperature; 0 if none, or several.
        weight: Name of the parameter that it takes; "" if none.
        largest_weight: The largest magnitude in it.
        in_float16: Whether the pass has computed in float16 by then.
    """

    operation: str
    module: str = ""
    in_backward: bool = False
    largest_input: float = 0.0
    largest_result: float | None = None
    meets_zero: bool = False
    meets_negative: bool = False
    of_infinities: bool = False
    cast_of: str = ""
    is_cast: bool = False
    maker: str = ""
    is_narrow: bool = True
    epsilon: float = 0.0
    divisor: float = 0.0
    weight: str = ""
    largest_weight: float = 0.0
    in_float16: bool = True

    @property
    def is_overflow(self) -> bool:
        """Whether its result is finite in float64."""
        return self.largest_result is not None and self.largest_result < LARGEST_OF_FLOAT64

    @property
    def is_of_float16(self) -> bool:
        """Whether float16 is to blame, and not that float32 cannot hold its result either."""
        size = self.largest_result
        is_beyond_float32 = size is not None and LARGEST_OF_FLOAT32 < size < math.inf
        return self.in_float16 and not is_beyond_float32

    @property
    def here(self) -> str:
        """The module."""
        is_number = self.module.replace(".", "").isdigit()
        return f"module {self.module}" if is_number else self.module or "this operation"

    @property
    def where(self) -> str:
        """The module and the operation."""
        return f"{self.module} ({self.operation})" if self.module else self.operation


class Origin(NamedTuple):
    """The origin of an infinity or a NaN.

    Attributes:
        failed: The operation that made it of finite numbers; None if none did.
        name: The argument, parameter or buffer that contained it.
        is_weight: Whether `name` is a parameter or a buffer.
        is_mask: Whether the program sets it itself, as in a mask.
        is_beyond: Whether it is a finite number in the program, above the largest float16 number.
        place: The module or line that sets a mask; "" if it is not known.
    """

    failed: FailedOperation | None = None
    name: str = ""
    is_weight: bool = False
    is_mask: bool = False
    is_beyond: bool = False
    place: str = ""


class Facts(NamedTuple):
    """What is known of a pass: `explained` writes the explanation from it.

    Attributes:
        origin: The origin of its first infinity or NaN; None if everything in it is finite.
        is_hidden: Whether `origin` makes the loss wrong, and finite.
        hidden: The origin of an overflow that makes a result wrong, and did not cause the skip.
        scale: The loss scale of the step.
        halvings: If `origin` is in the backward pass: after how many halvings of the loss scale the
            pass is finite; None if it never is.
        last: The module and the operation that overflow before the last of these halvings.
        why_not: Why nothing is known; "" if something is.
    """

    origin: Origin | None = None
    is_hidden: bool = False
    hidden: Origin | None = None
    scale: float = 1.0
    halvings: int | None = None
    last: str = ""
    why_not: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found."""
        return self.origin is None


def most_halvings(scale: float) -> int:
    """Returns how often a loss scale is halved before a step is called broken at every scale."""
    return max(HALVINGS, math.ceil(math.log2(scale)))


def halvings_until(is_finite_after: Callable[[int], bool], scale: float) -> int | None:
    """Returns after how many halvings of the loss scale a pass is finite; None if it never is.

    Examples:
        >>> halvings_until(lambda halvings: halvings >= 5, 2.0**15)
        5
    """
    if not is_finite_after(most_halvings(scale)):
        return None
    tried = range(1, most_halvings(scale) + 1)
    return tried[bisect.bisect_left(tried, True, key=is_finite_after)]


# --- The text -----------------------------------------------------------------------------------


def explained(facts: Facts) -> Explanation:
    """Writes the explanation of a step.

    Examples:
        >>> failed = FailedOperation("matmul", "head", largest_input=900, largest_result=131008)
        >>> str(explained(Facts(Origin(failed))).cause)
        'forward overflow'
    """
    if facts.origin is not None:
        told = _of_origin(facts.origin, facts)
    else:
        at = scale_in_words(facts.scale)
        finite = f"the forward and the backward pass are finite at a scale of {at}"
        told = Explanation(Cause.UNKNOWN, f"not explained: {facts.why_not or finite}")
    reason, advice = told.reason, told.advice
    reason += _HIDES if facts.is_hidden else ""
    if facts.hidden:
        hidden = _of_origin(facts.hidden, Facts())
        advice += f". Besides, {hidden.reason}{_HIDES}: {hidden.advice}"
    return dataclasses.replace(told, reason=reason, advice=advice)


def _of_origin(origin: Origin, facts: Facts) -> Explanation:
    """An infinity or a NaN of which the origin is known."""
    failed = origin.failed
    if origin.is_beyond:
        name = failed.where if failed else origin.place
        reason = "a number that the program sets is above the largest float16 number, 65,504"
        reason += f", and is infinite when it reaches {name}" if name else ""
        advice = "use a smaller number, such as -1e4 in a mask, or compute in float32"
        where = (failed.operation, failed.module) if failed else ("", origin.place)
        return Explanation(Cause.FORWARD_OVERFLOW, reason, advice, *where)
    if failed is not None:
        told = _of_scale(facts, failed) if facts.halvings is not None else _meaning(facts, failed)
        how = failed.in_backward, facts.halvings, failed.is_of_float16
        return Explanation(*told, failed.operation, failed.module, *how)
    if origin.is_mask:
        place = f" in {origin.place}" if origin.place else ""
        reason = f"an infinity or NaN that the program sets{place} reaches the loss"
        advice = "set a finite number there, or check the targets and the loss function"
        return Explanation(Cause.LOSS, reason, advice, module=origin.place)
    if origin.is_weight:
        reason = f"{origin.name} of the model is not finite"
        advice = "no later step repairs it: load a checkpoint"
        return Explanation(Cause.WEIGHTS, reason, advice, "", origin.name, in_float16=False)
    reason = f"the argument {origin.name} of the model contains infinities or NaN"
    advice = "check the data, or what has computed it"
    return Explanation(Cause.BATCH, reason, advice, origin.name, in_float16=False)


def _of_scale(facts: Facts, failed: FailedOperation) -> tuple[Cause, str, str]:
    """An overflow of the backward pass that a lower loss scale mends."""
    halvings, last = facts.halvings or 0, facts.last or failed.where
    low = facts.scale / 2**halvings
    size = failed.largest_result
    above = "" if size is None else f" ({_size(size)})"
    reason = "" if facts.hidden else "the forward pass is finite; "
    reason += (
        f"at a loss scale of {scale_in_words(facts.scale)}, {failed.where} overflows in the "
        f"backward pass{above}, and after {halvings} halving{'s'[: halvings > 1]}, at "
        f"{scale_in_words(low)}, that pass is finite"
    )
    if last != failed.where:
        reason += f"; the last to overflow is {last}"
    is_strange = halvings >= _MANY_HALVINGS and low < _LOW
    parts = [f"look for a reason why the gradient is so large at {last}"] if is_strange else []
    parts += [f"use a rule with such a scale, as {_rule_down_to(low)}"] if low < 1 else []
    advice = "this is normal: the scale falls by itself"
    return Cause.SCALE, reason, ", or ".join(parts) or advice


def _rule_down_to(scale: float) -> str:
    return f"DynamicScale(min_scale={scale_in_words(scale)})"


def _meaning(facts: Facts, failed: FailedOperation) -> tuple[Cause, str, str]:
    """An operation that fails at every loss scale, down to the lowest that is tried."""
    where, when = failed.where, "in the forward pass"
    if failed.of_infinities:
        reason = f"{where} makes NaN of infinities that the program sets, as in a row that is"
        advice = "mask with a finite number such as -1e4, or leave such rows out"
        return Cause.SINGULAR, f"{reason} masked as a whole", advice
    if failed.largest_result is None:
        when = "in the backward pass, at any loss scale" if failed.in_backward else when
        return Cause.SINGULAR, f"{where} {_singularity(failed)} {when}", _about_epsilon(failed)
    cause = Cause.FORWARD_OVERFLOW
    if failed.in_backward:
        cause = Cause.BACKWARD_OVERFLOW
        lowest = scale_in_words(facts.scale / 2 ** most_halvings(facts.scale))
        when = f"in the backward pass, also at a loss scale of {lowest}"
    if failed.is_cast:
        made = f"the result of {failed.maker}" if failed.maker else "a number"
        of = f"the parameter {failed.cast_of}" if failed.cast_of else made
        reason = (
            f"{of} reaches {failed.largest_input:.3g}, above the largest float16 number, 65,504, "
            f"and {where} casts it to float16"
        )
        advice = f"{_in_float32(failed)}, or make the number smaller"
        return cause, reason, f"{advice}; {_GROWN}" if failed.cast_of else advice
    does = f"divides by {failed.divisor:.3g} and overflows" if failed.divisor else "overflows"
    reason = f"{where} {does} {when}: its input reaches {failed.largest_input:.3g}"
    if failed.weight:
        reason += f", {failed.weight} {failed.largest_weight:.3g}"
    if failed.is_overflow:
        reason += f", its result {_size(failed.largest_result)}"
    advice = f"{_in_float32(failed)}, or " if failed.is_of_float16 else ""
    gain = (failed.largest_result or 0.0) / (failed.largest_input or math.inf)
    if failed.weight and failed.is_overflow and gain >= _LARGE_GAIN:
        advice += f"make {failed.weight} smaller (the result is {gain:.3g} times the input)"
        return cause, reason, f"{advice}; {_GROWN}"
    advice += "make its input smaller"
    if failed.divisor and failed.is_overflow:
        limit = LARGEST if failed.is_narrow else LARGEST_OF_FLOAT32
        least = _rounded_up(failed.divisor * (failed.largest_result or 0.0) / limit)
        return cause, reason, f"{advice}, or divide by {least} or more"
    # Divided by a small number, most likely.
    parts = ["gamma", *_SINGULAR] if failed.largest_input <= 1 else _SINGULAR.keys() - {"pow"}
    is_near_zero = any(part in failed.operation.lower() for part in parts)
    return cause, reason, _about_epsilon(failed) if is_near_zero else advice


def _in_float32(failed: FailedOperation) -> str:
    """The advice to compute in float32; what is in float32 may take a number from float16."""
    what = failed.here if failed.is_narrow else f"what {failed.here} takes"
    return f"compute {what} in float32"


def _singularity(failed: FailedOperation) -> str:
    """The action of an operation, as a verb."""
    name = _plain_name(failed)
    if failed.meets_zero and name not in _BOUNDED:
        words = None if failed.in_backward else _SINGULAR.get(name)
        return words or "has no finite result for 0"
    if failed.meets_negative and name in _OF_POSITIVE:
        return "has no finite result for a negative number"
    return "has no finite result for its input"


def _plain_name(failed: FailedOperation) -> str:
    """The name of an operation, the same in every framework."""
    name = failed.operation.rpartition("(")[2].rpartition(" ")[2].strip("_)").lower()
    return _SAME.get(name, name)


def _about_epsilon(failed: FailedOperation) -> str:
    """The remedy for a number that is 0, or nearly 0, in float16."""
    name = _plain_name(failed)
    least = _ADVISED_EPSILON.get(name, _OTHER_EPSILON)
    if name == "div":
        least = max(least, math.sqrt(failed.largest_input / LARGEST))
    epsilon = _rounded_up(least)
    if failed.is_of_float16 and 0 < failed.epsilon <= SMALLEST / 2:
        return (
            f"the epsilon {failed.epsilon:g} is 0 in float16, whose smallest number above 0 is "
            f"{SMALLEST:.3g}; use {epsilon} or more, or {_in_float32(failed)}"
        )
    if failed.largest_result is None:
        if name in _BOUNDED:
            return f"keep the input of {name} in {failed.here} away from the ends of its domain"
        if name in _OF_POSITIVE and not failed.meets_zero:
            return f"keep the input of {name} in {failed.here} above 0"
        if any(part in name for part in _OF_MATRICES):
            return f"add {epsilon} or more to the diagonal of the matrix in {failed.here}"
        if not failed.meets_zero:
            return f"give {name} in {failed.here} an input for which it has a finite result"
    advice = f"keep the numbers there away from 0, with an epsilon of {epsilon} or more"
    if not failed.is_of_float16:
        return advice
    condition = ", if they are not 0 there" if failed.largest_result is None else ""
    return f"{advice}, or {_in_float32(failed)}{condition}"


def _rounded_up(number: float) -> str:
    """Returns a number for a text, rounded up to one digit."""
    digit = 10.0 ** math.floor(math.log10(number))
    return f"{math.ceil(round(number / digit, 3)) * digit:g}"


def scale_in_words(scale: float) -> str:
    """Returns a loss scale for a text: a large or a small one as a power of two.

    Examples:
        >>> scale_in_words(2.0**15), scale_in_words(2.0**30), scale_in_words(2.0**-9)
        ('32768', '2**30', '2**-9')
    """
    exponent = math.log2(scale)
    is_long = abs(exponent) >= 20 or exponent < -4
    return f"2**{int(exponent)}" if is_long and exponent % 1 == 0 else f"{scale:g}"


def _size(value: float) -> str:
    """Returns a number for a text, and how far above the largest float16 number it is.

    Examples:
        >>> _size(1e6), _size(65520.0), _size(1.5)
        ('1e+06, 15.3 x 65,504', 'just above 65,504', '1.5')
    """
    if value <= LARGEST or value >= LARGEST_OF_FLOAT32:
        return f"{value:.3g}"
    factor = f"{value / LARGEST:.3g}"
    return "just above 65,504" if factor == "1" else f"{value:.3g}, {factor} x 65,504"


def _capital(clause: str) -> str:
    return clause[0].upper() + clause[1:]

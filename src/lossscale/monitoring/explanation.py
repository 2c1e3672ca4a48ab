"""Why a step was skipped: the cause, the operation, and what to do.

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
from typing import Any, NamedTuple

LARGEST = 65504.0
"""The largest number of float16."""
LARGEST_OF_FLOAT32 = 2.0**128
LARGEST_OF_FLOAT64 = sys.float_info.max
SMALLEST = 2.0**-24
"""The smallest one above 0; half of it, and less, is rounded to 0."""
HALVINGS = 24
"""The fewest halvings of a loss scale that are tried: 2**-24 is the smallest float16 number. From
a higher one the scale falls to 1."""

_CHECK_THE_LOSS = (
    "check the targets and the loss function; explain(model, loss_fn, batch) names its operation "
    "and line"
)
NO_SCALE_HELPS = "no loss scale helps: "
"""Advice begins with it if no loss scale makes the step finite."""
_FALLS_BY_ITSELF = "this is normal: the scale falls by itself"
_LOWER_HELPS = "a lower scale helps, or outputs in float32"
_OF_OUTPUTS = "gradient of the outputs"
_FINITE = "the forward pass is finite; "
# Those whose derivatives float16 can hold, such as 1 / epsilon**2.
_ADVISED_EPSILON = {"div": 4e-3, "reciprocal": 4e-3, "rsqrt": 1e-3, "pow": 4e-3}
_ADVISED_EPSILON |= {"digamma": 4e-3, "polygamma": 4e-2}
_OTHER_EPSILON = 1e-4
_MANY_HALVINGS, _LOW = 8, 2**8
_SINGULAR = {
    "rsqrt": "divides by a square root of 0",
    "reciprocal": "divides by 0",
    "div": "divides by 0",
    "log": "takes the logarithm of 0",
    "pow": "raises 0 to a negative power",
    "rem": "divides by 0",
}
_OF_POSITIVE = ("rsqrt", "sqrt", "log", "pow")
_BOUNDED = ("acos", "asin", "atanh", "acosh", "erfinv", "erf_inv", "log1p")
"""Operations that are not finite outside of an interval, or at its ends."""
_OF_MATRICES = ("cholesky", "linalg", "solve", "triangular", "inverse", "eigh", "svd")
"""Parts of the names of operations on matrices."""
_SAME = {"true_divide": "div", "truediv": "div", "divide": "div", "addcdiv": "div", "power": "pow"}
_SAME |= {"log2": "log", "log10": "log", "fmod": "rem", "remainder": "rem", "floormod": "rem"}
_SAME |= {"realdiv": "div", "divnonan": "div", "integer_pow": "pow", "inv": "reciprocal"}


class Cause(enum.StrEnum):
    """Why a step was skipped.

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


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a step was skipped, and what to do.

    Attributes:
        cause: The cause.
        reason: The event, as a clause.
        advice: The remedy, as a clause.
        operation: The first operation with a result that is not finite, or the argument that is
            not; "" if it is not known.
        module: The path of its module, the line if it is outside of modules, or the parameter that
            is not finite; "" if not known.
        in_backward: Whether it is an operation of the backward pass.
        halvings: Number of times the loss scale must be halved, or 1 if it is not known, as for
            gradients that overflow in outputs in float16; None if no loss scale helps.
        in_float16: Whether the pass had computed in float16 by then. If not, float16 is not to
            blame.

    Examples:
        >>> print(unknown("the model was compiled"))
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
        return f"{reason}. {_capital(self.advice)}." if self.advice else f"{reason}."

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as a dictionary of plain Python values, with its text."""
        return {**dataclasses.asdict(self), "cause": self.cause.value, "text": self.text}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Explanation:
        """Returns the explanation that `to_dict` has saved."""
        named = {f.name: saved[f.name] for f in dataclasses.fields(cls) if f.name in saved}
        return cls(**{**named, "cause": Cause(saved["cause"])})


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
    in_float16: bool = True

    @property
    def is_overflow(self) -> bool:
        """Whether its result is finite in float64."""
        return self.largest_result is not None and self.largest_result < LARGEST_OF_FLOAT64

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


def of_forward_pass(origin: Origin) -> Explanation:
    """Returns the explanation of something that is not finite in a forward pass.

    Examples:
        >>> of_forward_pass(Origin(name="x")).cause
        <Cause.BATCH: 'batch'>
    """
    if origin.failed is not None:
        return explained(origin.failed)
    if origin.is_mask:
        return set_by_the_program(origin.place)
    return (not_finite_weights if origin.is_weight else not_finite_argument)(origin.name)


def hidden_overflow(origin: Origin) -> Explanation:
    """Returns the explanation of an overflow that makes the loss wrong, and finite."""
    found = of_forward_pass(origin)
    return dataclasses.replace(found, reason=f"{found.reason}, and a later operation hides it")


def with_hidden(found: Explanation, origin: Origin | None) -> Explanation:
    """Adds an overflow, if there is one, that makes a result wrong and did not cause the skip."""
    if origin is None:
        return found
    hidden = hidden_overflow(origin)
    remedy = hidden.advice.removeprefix(NO_SCALE_HELPS)
    advice = f"{found.advice}. Besides, {hidden.reason}: {remedy}"
    return dataclasses.replace(found, reason=found.reason.removeprefix(_FINITE), advice=advice)


def explained(
    failed: FailedOperation, *, scale: float = 1.0, halvings: int | None = None, last: str = ""
) -> Explanation:
    """Returns what an operation that failed means.

    Args:
        failed: The operation.
        scale: The loss scale of the step.
        halvings: If it is in the backward pass: after how many halvings of the loss scale the pass
            is finite; None if it never is.
        last: The module and the operation that overflow before the last of these halvings.

    Examples:
        >>> failed = FailedOperation("matmul", "head", largest_input=900, largest_result=131008)
        >>> str(explained(failed).cause)
        'forward overflow'
    """
    size = failed.largest_result
    # Not float16 alone is to blame for what float32 cannot hold either.
    if size is not None and LARGEST_OF_FLOAT32 < size < math.inf:
        failed = failed._replace(in_float16=False)
    lowest = scale_in_words(scale / 2 ** most_halvings(scale))
    cause, reason, advice = _meaning(failed, lowest)
    if halvings is not None:
        cause, last, low = Cause.SCALE, last or failed.where, scale / 2**halvings
        above = "" if size is None else f" ({_size(size)})"
        reason = (
            f"{_FINITE}at a loss scale of {scale_in_words(scale)}, "
            f"{failed.where} overflows in the backward pass{above}, and after {halvings} "
            f"halving{'s'[: halvings > 1]}, at {scale_in_words(low)}, that pass is finite"
        )
        if last != failed.where:
            reason += f"; the last to overflow is {last}"
        parts = []
        if halvings >= _MANY_HALVINGS and low < _LOW:
            parts.append(f"look for a reason why the gradient is so large at {last}")
        if low < 1:
            rule = f"DynamicScale(min_scale={scale_in_words(low)})"
            parts.append(f"use a rule with such a scale, as {rule}")
        advice = ", or ".join(parts) or _FALLS_BY_ITSELF
    elif cause is not Cause.BACKWARD_OVERFLOW:
        advice = NO_SCALE_HELPS + advice
    return Explanation(
        cause,
        reason,
        advice,
        failed.operation,
        failed.module,
        failed.in_backward,
        halvings,
        failed.in_float16,
    )


def _meaning(failed: FailedOperation, lowest: str) -> tuple[Cause, str, str]:
    """Returns the cause, the reason and the advice if no loss scale helps, down to the lowest."""
    where = failed.where
    when = (
        "in the backward pass, at any loss scale" if failed.in_backward else "in the forward pass"
    )
    if failed.of_infinities:
        return (
            Cause.SINGULAR,
            f"{where} makes NaN of infinities that the program sets, as in a row that is "
            "masked as a whole",
            "mask with a finite number such as -1e4, or leave such rows out",
        )
    if failed.largest_result is None:
        return (
            Cause.SINGULAR,
            f"{where} {_singularity(failed)} {when}",
            _about_epsilon(failed),
        )
    cause = Cause.FORWARD_OVERFLOW
    if failed.in_backward:
        cause = Cause.BACKWARD_OVERFLOW
        when = f"in the backward pass, also at a loss scale of {lowest}"
    if failed.is_cast:
        made = f"the result of {failed.maker}" if failed.maker else "a number"
        of = f"the parameter {failed.cast_of}" if failed.cast_of else made
        reason = (
            f"{of} reaches {failed.largest_input:.3g}, above the largest float16 number, 65,504, "
            f"and {where} casts it to float16"
        )
        return cause, reason, f"{_in_float32(failed)}, or make the number smaller"
    reason = f"{where} overflows {when}: its input reaches {failed.largest_input:.3g}"
    if failed.is_overflow:
        reason += f", its result {_size(failed.largest_result)}"
    advice = f"{_in_float32(failed)}, or " if failed.in_float16 else ""
    advice += "make its input smaller"
    # Divided by a small number, most likely.
    parts = [part for part in _SINGULAR if part != "pow"]
    parts += ["pow", "gamma"] if failed.largest_input <= 1 else []
    if any(part in failed.operation.lower() for part in parts):
        advice = _about_epsilon(failed)
    return cause, reason, advice


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
    digit = 10.0 ** math.floor(math.log10(least))
    epsilon = f"{math.ceil(round(least / digit, 3)) * digit:g}"
    if failed.in_float16 and 0 < failed.epsilon <= SMALLEST / 2:
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
    if not failed.in_float16:
        return advice
    condition = ", if they are not 0 there" if failed.largest_result is None else ""
    return f"{advice}, or {_in_float32(failed)}{condition}"


def not_finite_argument(name: str) -> Explanation:
    """Returns the explanation of a batch that is not finite.

    Args:
        name: The name of the argument of the model.
    """
    reason = f"the argument {name} of the model contains infinities or NaN"
    advice = f"{NO_SCALE_HELPS}check the data, or what has computed it"
    return Explanation(Cause.BATCH, reason, advice, name, in_float16=False)


def not_finite_weights(name: str) -> Explanation:
    """Returns the explanation of weights that are not finite.

    Args:
        name: The name of the parameter or buffer.
    """
    reason = f"{name} of the model is not finite"
    advice = "no later step repairs it: load a checkpoint"
    return Explanation(Cause.WEIGHTS, reason, advice, module=name, in_float16=False)


def constant_beyond_float16(found: Explanation) -> Explanation:
    """Returns what an infinity of the program means if it is a finite number in float32.

    Args:
        found: The explanation of the same pass, of infinities that the program sets.
    """
    reason = "a number that the program sets is above the largest float16 number, 65,504"
    name = FailedOperation(found.operation, found.module).where if found.operation else found.module
    if name:
        reason += f", and is infinite when it reaches {name}"
    advice = f"{NO_SCALE_HELPS}use a smaller number, such as -1e4 in a mask, or compute in float32"
    return dataclasses.replace(
        found, cause=Cause.FORWARD_OVERFLOW, reason=reason, advice=advice, in_float16=True
    )


def set_by_the_program(place: str) -> Explanation:
    """Returns the explanation of a loss with an infinity or a NaN that the program has set.

    Args:
        place: The line or the module; "" if it is not known.
    """
    reason = f"an infinity or NaN that the program sets{place and f' in {place}'} reaches the loss"
    advice = "set a finite number there, or check the targets and the loss function"
    return Explanation(Cause.LOSS, reason, advice, module=place)


def scaled_outputs(infs: int, scale: float) -> Explanation:
    """Returns the explanation of gradients of the model's outputs that overflow in float16.

    Args:
        infs: The number of gradients.
        scale: The loss scale of the step.
    """
    reason = (
        f"the outputs of the model are finite; at a loss scale of {scale_in_words(scale)}, {infs} "
        "of their gradients, in float16, overflow"
    )
    return Explanation(Cause.SCALE, reason, _LOWER_HELPS, _OF_OUTPUTS, "", True, 1)


def at_the_lowest_scale(found: Explanation, scale: float) -> Explanation:
    """Returns an explanation if the rule lets the scale fall no lower.

    Args:
        found: The explanation.
        scale: The loss scale of the step.
    """
    is_known = found.operation != _OF_OUTPUTS
    lower = scale_in_words(scale / 2 ** (found.halvings or 0) if is_known else SMALLEST)
    kept = f"the rule lets the scale fall no lower; DynamicScale(min_scale={lower}) does"
    if not is_known and scale <= SMALLEST:
        kept = "no scale helps: return the outputs in float32, or make the loss smaller"
    advice = found.advice.replace(_FALLS_BY_ITSELF, kept).replace(_LOWER_HELPS, kept)
    return dataclasses.replace(found, advice=advice)


def with_loss(found: Explanation, loss: float) -> Explanation:
    """Returns an explanation if the loss is known: `scaled_outputs` means something else then.

    Args:
        found: The explanation.
        loss: The unscaled loss of the step.
    """
    if found.operation != _OF_OUTPUTS or math.isfinite(loss):
        return found
    # It begins with the call of the model, if there were several.
    are_finite = found.reason.partition(";")[0]
    reason = f"{are_finite}, but the loss is {loss:g}"
    return Explanation(Cause.LOSS, reason, _CHECK_THE_LOSS, in_backward=True)


def in_the_loss(infs: int, nans: int, largest_output: float) -> Explanation:
    """Returns the explanation of gradients that are not finite where they reach the outputs.

    Args:
        infs: The number of infinite ones.
        nans: The number of those that are NaN.
        largest_output: The largest magnitude of an output.
    """
    reason = (
        f"the outputs of the model are finite, up to {largest_output:.3g}, but {infs} infinities "
        f"and {nans} NaN reach them from the loss"
    )
    advice = f"a lower scale helps if float16 overflows there; else {_CHECK_THE_LOSS}"
    return Explanation(Cause.LOSS, reason, advice, in_backward=True)


def unknown(why: str) -> Explanation:
    """Returns the explanation of a step that could not be explained.

    Args:
        why: Why it could not be, as a clause.
    """
    return Explanation(Cause.UNKNOWN, f"not explained: {why}")


def nothing_to_explain(scale: float) -> Explanation:
    """Returns the explanation of a pass that is finite.

    Args:
        scale: The loss scale.
    """
    where = f"at a scale of {scale_in_words(scale)}"
    return unknown(f"the forward and the backward pass are finite {where}")


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

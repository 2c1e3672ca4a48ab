"""Why a pass is not finite: the cause, the operation, and what to do.

A watcher of a framework finds the first operation that makes an infinity or a NaN of finite
numbers, and describes it as an `Origin`. Causes and texts are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from typing import NamedTuple

LARGEST = 65504.0
"""The largest number of float16."""
LARGEST_OF_FLOAT32 = 2.0**128
LARGEST_OF_FLOAT64 = sys.float_info.max
SMALLEST = 2.0**-24
"""The smallest one above 0; half of it, and less, is rounded to 0."""
NEAR = 4e-3
"""The smallest round number whose -2nd power, in derivatives of divisions, float16 holds: inputs of
divisions, logarithms and roots that are nearer to 0 need an epsilon."""


class Cause(enum.StrEnum):
    """Why a pass is not finite.

    Attributes:
        SCALE: The forward pass is finite, and at a lower loss scale the backward pass is, too.
        FORWARD_OVERFLOW: A result of the forward pass is too large for float16.
        SINGULAR: A division by 0, the logarithm of 0, or another operation without a finite result.
        BACKWARD_OVERFLOW: The backward pass overflows also at a loss scale of 2**-24.
        BATCH: An argument of the model contains an infinity or a NaN.
        WEIGHTS: A parameter or a buffer does.
        LOSS: The program sets an infinity or NaN that reaches the loss.
        UNKNOWN: The pass is finite, or could not be watched.
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


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a pass is not finite, and what to do.

    Attributes:
        cause: The cause.
        reason: The event, as a clause.
        advice: The remedy, as a clause.
        operation: The first operation with a result that is not finite, or the argument that is
            not; "" if it is not known.
        module: The path of its module, the line if it is outside of modules, or the parameter that
            is not finite; "" if not known.
        in_backward: Whether it is an operation of the backward pass.
        in_float16: Whether the pass had computed in float16 by then. If not, float16 is not to
            blame.

    Examples:
        >>> print(not_explained("the model is sharded"))
        Not explained: the model is sharded.
    """

    cause: Cause
    reason: str
    advice: str = ""
    operation: str = ""
    module: str = ""
    in_backward: bool = False
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


_NO_RESULT = "{where} has no finite result for its input in the {when}"
_OVERFLOWS = "{where} overflows in the {when}: its input reaches {input:.3g}{result}"
_KEEP_AWAY = f"keep its input away from 0, with an epsilon of {NEAR:g} or more"
_EPSILON_OF_0 = (
    "the epsilon {epsilon:g} is 0 in float16, whose smallest number above 0 is "
    f"{SMALLEST:.3g}; use {NEAR:g} or more, or {{wide}}"
)


class Failure(enum.Enum):
    """What is not finite in a pass, and why: the cause, the reason and the advice.

    Attributes:
        ARGUMENT: An argument of the model.
        WEIGHT: A parameter or a buffer.
        SET: A number that the program sets, as in a mask.
        BEYOND: A finite number that the program sets, above the largest float16 number.
        MASKED: The result of an operation that takes infinities which the program sets.
        CAST: A number that is cast to float16.
        TOO_LARGE: A result that is finite in float64, or would be in a wider dtype.
        SMALL_INPUT: The same, of a division, logarithm, root or power of numbers near 0.
        ZERO: The result of one of these at 0, or of a normalization.
        OUT_OF_RANGE: The result of a function outside of its range.
        LONG_LABEL: A CTC loss.
        IGNORED: A cross-entropy.
        NOTHING: The result of an operation that takes no numbers, such as a mean.
        OTHER: The result of another operation.
    """

    ARGUMENT = (
        Cause.BATCH,
        "the argument {where} of the model contains infinities or NaN",
        "check the data, or what has computed it",
    )
    WEIGHT = (
        Cause.WEIGHTS,
        "{where} of the model is not finite",
        "no later step repairs it: load a checkpoint",
    )
    SET = (
        Cause.LOSS,
        "an infinity or NaN that the program sets{place} reaches the loss",
        "set a finite number there, or check the targets and the loss function",
    )
    BEYOND = (
        Cause.FORWARD_OVERFLOW,
        "a number that the program sets is above the largest float16 number, 65,504{arrives}",
        "use a smaller number, such as -1e4 in a mask, or compute in float32",
    )
    MASKED = (
        Cause.SINGULAR,
        "{where} makes NaN of infinities that the program sets, as in a row that is masked as a "
        "whole",
        "mask with a finite number such as -1e4, or leave such rows out",
    )
    CAST = (
        Cause.FORWARD_OVERFLOW,
        "{source} reaches {input:.3g}, above the largest float16 number, 65,504, and {where} casts "
        "it to float16",
        "{wide_or}make the number smaller",
    )
    TOO_LARGE = (Cause.FORWARD_OVERFLOW, _OVERFLOWS, "{wide_or}make its input smaller")
    SMALL_INPUT = (Cause.FORWARD_OVERFLOW, _OVERFLOWS, "{wide_or}" + _KEEP_AWAY)
    ZERO = (Cause.SINGULAR, _NO_RESULT, _KEEP_AWAY + "{or_wide}")
    OUT_OF_RANGE = (Cause.SINGULAR, _NO_RESULT, "check the range of its input{or_wide}")
    LONG_LABEL = (
        Cause.SINGULAR,
        _NO_RESULT,
        "leave out samples whose label is longer than their input, or pass PyTorch's "
        "zero_infinity=True",
    )
    IGNORED = (
        Cause.SINGULAR,
        _NO_RESULT,
        "leave out batches whose targets are all ignored, a mean over nothing",
    )
    NOTHING = (
        Cause.SINGULAR,
        _NO_RESULT,
        "leave out batches in which its input is empty, as of a mean over nothing",
    )
    OTHER = (Cause.SINGULAR, _NO_RESULT, "check its input")


class Origin(NamedTuple):
    """The origin of an infinity or a NaN.

    Attributes:
        failure: What is not finite.
        operation: The name of the operation, or of the argument; "" if there is none.
        module: The path of the module or layer, the line of the program if it is in none, or the
            name of the parameter; "" if not known.
        in_backward: Whether it is in the backward pass.
        largest_input: The largest finite magnitude of what the operation takes.
        largest_result: The largest magnitude that it computes from the same numbers in float64;
            `LARGEST_OF_FLOAT64` if even this overflows, None if it is not finite for another
            reason, infinity if it cannot be computed.
        source: The parameter or the operation whose result is cast.
        epsilon: A small number that is added in the same module, in float16; 0 if none.
        is_narrow: Whether the operation takes or returns float16.
        in_float16: Whether the pass has computed in float16 by then.
    """

    failure: Failure
    operation: str = ""
    module: str = ""
    in_backward: bool = False
    largest_input: float = 0.0
    largest_result: float | None = None
    source: str = ""
    epsilon: float = 0.0
    is_narrow: bool = True
    in_float16: bool = True

    @property
    def is_set(self) -> bool:
        """Whether the program sets it itself, as in a mask."""
        return self.failure in (Failure.SET, Failure.BEYOND) and not self.operation

    @property
    def is_operation(self) -> bool:
        """Whether an operation made it of finite numbers, or of those that the program sets."""
        return bool(self.operation) and self.failure is not Failure.ARGUMENT

    @property
    def is_overflow(self) -> bool:
        """Whether it is a result that is finite in float64."""
        return self.largest_result is not None and self.largest_result < LARGEST_OF_FLOAT64

    @property
    def is_of_float16(self) -> bool:
        """Whether float16 is to blame, and not that float32 cannot hold it either."""
        size = self.largest_result
        is_beyond_float32 = size is not None and LARGEST_OF_FLOAT32 < size < math.inf
        return self.in_float16 and not is_beyond_float32

    @property
    def where(self) -> str:
        """The module and the operation."""
        both = self.module and self.operation
        return f"{self.module} ({self.operation})" if both else self.module or self.operation


# --- The text -----------------------------------------------------------------------------------


def explained(
    origin: Origin | None,
    hidden: Origin | None = None,
    *,
    scale: float = 1.0,
    is_scaled: bool = False,
) -> Explanation:
    """Writes the explanation of a pass.

    Args:
        origin: The origin of its first infinity or NaN; None if everything in it is finite.
        hidden: The first operation that overflows, and whose result a later one made finite.
        scale: The loss scale.
        is_scaled: Whether the pass is finite at a low loss scale.

    Examples:
        >>> failed = Origin(Failure.TOO_LARGE, "matmul", "head", largest_result=131008)
        >>> str(explained(failed).cause)
        'forward overflow'
    """
    at = scale_in_words(scale)
    where = "" if hidden is None else hidden.where
    event = f"{where} overflows, and a later operation makes it finite again"
    if origin is not None:
        cause, reason, advice = _meaning(origin, at if is_scaled else "")
        advice = f"{advice}. Before it, {event}" if hidden else advice
        named = origin.operation, origin.module, origin.in_backward, origin.is_of_float16
        return Explanation(cause, reason, advice, *named)
    if hidden is not None:
        advice = "this is right before a tanh, and wrong in a norm: compute it in float32 if unsure"
        reason = f"the pass is finite, but {event}"
        return Explanation(Cause.UNKNOWN, reason, advice, hidden.operation, hidden.module)
    return not_explained(
        f"the forward and the backward pass are finite at a scale of {at}; with other random "
        "numbers or weights, as a step may have had, they may not be"
    )


def not_explained(why: str) -> Explanation:
    """The explanation of a pass of which nothing is known, for this reason."""
    return Explanation(Cause.UNKNOWN, f"not explained: {why}")


def _meaning(origin: Origin, at: str) -> tuple[Cause, str, str]:
    """The cause, the reason, the advice; `at` is the scale if the pass is finite at a low one."""
    size = "" if origin.largest_result is None else f"{origin.largest_result:.3g}"
    if at:
        reason = f"at a loss scale of {at}, {origin.where} overflows in the backward pass"
        reason += f"{size and f' ({size})'}; at a low one, that pass is finite"
        return Cause.SCALE, reason, "this is normal: the scale falls by itself, down to min_scale"
    cause, reason, advice = origin.failure.value
    if cause is Cause.FORWARD_OVERFLOW and origin.in_backward:
        cause = Cause.BACKWARD_OVERFLOW
    here = origin.module or "this operation"
    here = f"module {here}" if here.replace(".", "").isdigit() else here
    # What is in float32 may take a number from float16.
    wide = f"compute {here if origin.is_narrow else f'what {here} takes'} in float32"
    right = "not 0" if origin.failure is Failure.ZERO else "in range"
    if origin.failure is Failure.ZERO and origin.in_float16 and 0 < origin.epsilon <= SMALLEST / 2:
        advice = _EPSILON_OF_0
    words = {
        "where": origin.where,
        "when": "backward pass, at any loss scale" if origin.in_backward else "forward pass",
        "place": f" in {origin.module}" if origin.module else "",
        "arrives": f", and is infinite when it reaches {origin.where}" if origin.where else "",
        "source": origin.source,
        "epsilon": origin.epsilon,
        "input": origin.largest_input,
        "result": f", its result {size}" if origin.is_overflow else "",
        "wide": wide,
        "wide_or": f"{wide}, or " if origin.is_of_float16 else "",
        "or_wide": f", or {wide}, if it is {right} there" if origin.is_of_float16 else "",
    }
    return cause, reason.format(**words), advice.format(**words)


def scale_in_words(scale: float) -> str:
    """Returns a loss scale for a text: a large or a small one as a power of two.

    Examples:
        >>> scale_in_words(2.0**15), scale_in_words(2.0**30), scale_in_words(2.0**-9)
        ('32768', '2**30', '2**-9')
    """
    exponent = math.log2(scale)
    is_long = abs(exponent) >= 20 or exponent < -4
    return f"2**{int(exponent)}" if is_long and exponent % 1 == 0 else f"{scale:g}"


def _capital(clause: str) -> str:
    return clause[0].upper() + clause[1:]

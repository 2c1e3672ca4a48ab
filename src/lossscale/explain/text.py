"""Why a pass is not finite: the cause, the operation, and what to do.

A watcher of a framework finds the first operation that makes an infinity or a NaN of finite
numbers, and describes it as a `FailedOperation`. Causes and texts are the same everywhere.
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
_EPSILON = 4e-3
"""The smallest round number whose -2nd power, in derivatives of divisions, float16 holds."""


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
        >>> print(explained(Facts(why_not="the model is sharded")))
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
        of_infinities: Whether it takes infinities that the program sets, such as those of a mask.
        cast: The parameter or the operation whose result it casts to float16; "" if it is no cast.
        is_narrow: Whether it takes or returns float16.
        epsilon: A small number that is added in the same module, in float16; 0 if none.
        in_float16: Whether the pass has computed in float16 by then.
        meets_zero: Whether it normalizes, or takes a quotient, logarithm, root or power of 0 or of
            what is rounded to it.
    """

    operation: str
    module: str = ""
    in_backward: bool = False
    largest_input: float = 0.0
    largest_result: float | None = None
    of_infinities: bool = False
    cast: str = ""
    is_narrow: bool = True
    epsilon: float = 0.0
    in_float16: bool = True
    meets_zero: bool = False

    @property
    def is_of_float16(self) -> bool:
        """Whether float16 is to blame, and not that float32 cannot hold its result either."""
        size = self.largest_result
        is_beyond_float32 = size is not None and LARGEST_OF_FLOAT32 < size < math.inf
        return self.in_float16 and not is_beyond_float32

    @property
    def is_overflow(self) -> bool:
        """Whether its result is finite in float64."""
        return self.largest_result is not None and self.largest_result < LARGEST_OF_FLOAT64

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
        hidden: If so, the first operation that overflows, and whose result a later one made finite.
        scale: The loss scale.
        is_scaled: Whether the pass is finite at a low loss scale.
        why_not: Why nothing is known; "" if something is.
    """

    origin: Origin | None = None
    hidden: FailedOperation | None = None
    scale: float = 1.0
    is_scaled: bool = False
    why_not: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found."""
        return self.origin is None


# --- The text -----------------------------------------------------------------------------------


def explained(facts: Facts) -> Explanation:
    """Writes the explanation of a pass.

    Examples:
        >>> failed = FailedOperation("matmul", "head", largest_input=900, largest_result=131008)
        >>> str(explained(Facts(Origin(failed))).cause)
        'forward overflow'
    """
    hidden = facts.hidden
    where = "" if hidden is None else hidden.where
    event = f"{where} overflows, and a later operation makes it finite again"
    if facts.origin is not None:
        told = _of_origin(facts.origin, facts)
        advice = f"{told.advice}. Before it, {event}" if hidden else told.advice
        return dataclasses.replace(told, advice=advice)
    if hidden is not None:
        advice = "this is right before a tanh, and wrong in a norm: compute it in float32 if unsure"
        named = hidden.operation, hidden.module
        return Explanation(Cause.UNKNOWN, f"the pass is finite, but {event}", advice, *named)
    at = scale_in_words(facts.scale)
    finite = f"the forward and the backward pass are finite at a scale of {at}; with other random "
    finite += "numbers or weights, as a step may have had, they may not be"
    return Explanation(Cause.UNKNOWN, f"not explained: {facts.why_not or finite}")


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
        told = _meaning(facts, failed)
        how = failed.in_backward, failed.is_of_float16
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


def _meaning(facts: Facts, failed: FailedOperation) -> tuple[Cause, str, str]:
    """An operation that fails."""
    at, where = scale_in_words(facts.scale), failed.where
    if facts.is_scaled:
        reason = f"at a loss scale of {at}, {where} overflows in the backward pass"
        reason += f"{_size(failed)}; at a low one, that pass is finite"
        return Cause.SCALE, reason, "this is normal: the scale falls by itself, down to min_scale"
    if failed.of_infinities:
        reason = f"{where} makes NaN of infinities that the program sets, as in a row that is"
        advice = "mask with a finite number such as -1e4, or leave such rows out"
        return Cause.SINGULAR, f"{reason} masked as a whole", advice
    when = "backward pass, at any loss scale" if failed.in_backward else "forward pass"
    here = failed.module or "this operation"
    here = f"module {here}" if here.replace(".", "").isdigit() else here
    # What is in float32 may take a number from float16.
    wide = f"compute {here if failed.is_narrow else f'what {here} takes'} in float32"
    if failed.largest_result is None:
        advice = f"keep its input away from 0, with an epsilon of {_EPSILON:g} or more"
        if failed.is_of_float16:
            advice += f", or {wide}, if it is not 0 there"
        if failed.is_of_float16 and 0 < failed.epsilon <= SMALLEST / 2:
            advice = f"the epsilon {failed.epsilon:g} is 0 in float16, whose smallest number above "
            advice += f"0 is {SMALLEST:.3g}; use {_EPSILON:g} or more, or {wide}"
        elif "ctc" in failed.operation.lower():
            advice = "a label that does not fit into its input has none: pass zero_infinity=True, "
            advice += "or leave such samples out"
        elif not failed.meets_zero:
            advice = "check what it takes, such as the range of its input"
        return Cause.SINGULAR, f"{where} has no finite result for its input in the {when}", advice
    cause = Cause.BACKWARD_OVERFLOW if failed.in_backward else Cause.FORWARD_OVERFLOW
    reason = f"{where} overflows in the {when}: its input reaches {failed.largest_input:.3g}"
    if failed.cast:
        reason = f"{failed.cast} reaches {failed.largest_input:.3g}, above the largest float16 "
        reason += f"number, 65,504, and {where} casts it to float16"
    elif failed.is_overflow:
        reason += f", its result {failed.largest_result:.3g}"
    advice = f"{wide}, or make" if failed.is_of_float16 else "make"
    return cause, reason, f"{advice} {'the number' if failed.cast else 'its input'} smaller"


def scale_in_words(scale: float) -> str:
    """Returns a loss scale for a text: a large or a small one as a power of two.

    Examples:
        >>> scale_in_words(2.0**15), scale_in_words(2.0**30), scale_in_words(2.0**-9)
        ('32768', '2**30', '2**-9')
    """
    exponent = math.log2(scale)
    is_long = abs(exponent) >= 20 or exponent < -4
    return f"2**{int(exponent)}" if is_long and exponent % 1 == 0 else f"{scale:g}"


def _size(failed: FailedOperation) -> str:
    return "" if failed.largest_result is None else f" ({failed.largest_result:.3g})"


def _capital(clause: str) -> str:
    return clause[0].upper() + clause[1:]

"""Measures the accuracy of float16 gradients by comparing a few passes.

A framework computes the passes; everything else of a diagnosis is here and in NumPy. Scales are
powers of two here, and named by their exponents. A gradient is compared with that of float32: its
error is the norm of the difference over the norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError, first_line

LOSS = "loss"
"""The name of a loss that is the only one."""
TARGETS = "the targets"
"""The name in `outputs` of targets in the dtype of the output that they are compared with."""
TOLERANCE = 0.1
"""How wrong a gradient may be. An error doubles with each bit that gradients shrink in training:
this leaves two bits before it is half of the gradient."""
NOISE = 0.5
"""A gradient that is wrong by this at every scale is noise, such as that of a bias before a
normalization, which is 0 but for rounding."""
MARGIN = 4
"""How many bits gradients should stay below overflow: they grew by up to 5 in training."""

_LARGEST = 65504.0
_HIGHEST = 126
"""The exponent of the largest scale; the smallest one is its reciprocal."""
_SECOND = 8
"""Of the second scale: an error that scaling mends is a 256th there."""
_FAR = 36
"""How far above 1 scales are tried where no gradient says how large gradients are."""
_SAME = 0.01
"""Float32 gradients that differ by more between two loss scales depend on it."""
_RANDOM = "the loss draws random numbers that are others in each pass"


# --- What a framework computes --------------------------------------------------------------------


class OutputRange(NamedTuple):
    """The range of what an operation of the forward pass returned.

    Attributes:
        largest: The largest finite magnitude, 0 if there is none.
        finite: Whether every element is finite. Float16 may lose to infinity what float32 keeps;
            a mask of infinities is not finite in both.
    """

    largest: float
    finite: bool


class LossGradients(NamedTuple):
    """A loss and its gradients, from one forward and backward pass.

    Attributes:
        gradients: Name of each variable to the gradient of the scaled loss, a NumPy array of
            float32 (of a sparse one the rows that are in it); None if the loss does not depend on
            the variable.
        loss: The loss, not scaled.
        outputs: Name of each operation to the range of what it returned, in the order of the
            forward pass; empty if nobody asked. In float16 only those that returned float16.
    """

    gradients: Mapping[str, Any]
    loss: float
    outputs: Mapping[str, OutputRange] = {}


class GradientFunction(Protocol):
    """Computes the gradients of the losses of a model on a batch.

    It leaves the model, its optimizer and all random states as they were, bit for bit, also if the
    model fails. Each call draws the same random numbers, in float16 those of float32.
    """

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns a pass for each loss, under its name; a loss without a name is `LOSS`.

        Args:
            batch: One of the batches.
            scale: Multiplies each loss before it is derived.
            half: Whether to compute as training in float16 does; otherwise in float32.
            watch: Whether to return the ranges of what operations return.
        """


def numbered(name: str, counts: Counter[str]) -> str:
    """Returns a name with a number, if it is not the first of its kind that is counted."""
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}, {counts[name]}"


def checked_losses(
    returned: Any, is_tensor: Callable[[Any], bool], hint: Callable[[Any], str] = lambda loss: ""
) -> dict[str, Any]:
    """Returns the losses that a loss function returned, by their names.

    Args:
        returned: The returned value.
        is_tensor: Whether something is a tensor of the framework.
        hint: Returns what to do about a loss that is not one, " " before it; "" if it is unknown.

    Raises:
        ArgumentTypeError: If one is not a tensor.
        ArgumentError: If one is not a floating-point scalar.
    """
    wanted = (
        "`loss_fn` must return the loss, a floating-point tensor with one element, or a dictionary "
        "of such losses."
    )
    losses = dict(returned) if isinstance(returned, dict) and returned else {LOSS: returned}
    for loss in losses.values():
        if not is_tensor(loss):
            more = " Return their sum, or a dictionary of them."
            more = more if isinstance(loss, (list, tuple)) else hint(loss)
            raise ArgumentTypeError(f"{wanted} Received: a {type(loss).__name__}.{more}")
        if math.prod(loss.shape) != 1 or "float" not in str(loss.dtype):
            raise ArgumentError(
                f"{wanted} Received: a tensor of shape {tuple(loss.shape)} and dtype "
                f"{loss.dtype}. Take the mean or the sum."
            )
    return {str(name): loss for name, loss in losses.items()}


def check_owners(parameters: Iterable[str], losses: Iterable[str]) -> None:
    """Checks that each loss which `parameters` names is one that `loss_fn` returned.

    Raises:
        ArgumentError: If one is not.
    """
    returned = list(losses)
    if unknown := sorted(set(parameters) - set(returned)):
        raise ArgumentError(
            "`parameters` must name losses that `loss_fn` returns: "
            f"{', '.join(map(repr, returned))}. Received: {unknown[0]!r}."
        )


# --- What is measured -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GradientAccuracy:
    """How accurate the gradient of one variable is in float16, by loss scale.

    Attributes:
        name: The name of the variable.
        elements: How many numbers it has.
        largest: The largest magnitude in it in float32, the loss not scaled.
        errors: Exponent of each loss scale that was tried to the relative error there, the worst
            of all batches; infinite if it overflows. Empty if the gradient is 0 in float32.
        bfloat16: The relative error if it is rounded to bfloat16.
    """

    name: str
    elements: int
    largest: float
    errors: Mapping[int, float]
    bfloat16: float

    @property
    def best_error(self) -> float:
        """The smallest error at any scale."""
        return min(self.errors.values(), default=math.inf)

    @property
    def is_noise(self) -> bool:
        """Whether float16 is inaccurate at every scale, so that no scale can be judged by it."""
        return self.best_error >= NOISE

    @property
    def is_zero(self) -> bool:
        """Whether every element is 0 in float32."""
        return self.largest == 0 and self.elements > 0

    def excess_error(self, exponent: int) -> float:
        """Returns the error at a scale that was tried beyond that at its best scale."""
        return _beyond(self.errors[exponent], self.best_error)


@dataclasses.dataclass(frozen=True)
class Operation:
    """How much of the range of float16 an operation of the forward pass leaves.

    Attributes:
        name: The name of the operation.
        room: Bits between the largest number that it returned and 65,504.
        finite: Whether float16 loses nothing to infinity that float32 keeps.
    """

    name: str
    room: float
    finite: bool


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of one loss.

    Attributes:
        gradients: Those of the variables, in their order.
        operations: Those whose results are float16, in their order; empty if none was watched.
        lowest_exponent: That of the lowest scale where every gradient is right; 0 for 0 or less.
        highest_exponent: That of the highest scale where every gradient is finite.
        highest_is_bound: Whether nothing higher than that was tried.
        overflows_at: Name of the operation, or "the loss", that overflows in float16; "" if none.
        reference: The exponent of the loss scale that the float32 gradients were computed at: 0,
            or higher for a model that casts to float16 itself.
        tolerance: How wrong a gradient may be.
        in_use: The loss scale that trains, and the name and error of the worst gradient there.
        batches: How many batches were measured on.
        passes: How many forward and backward passes that took.
        unknown: Why there is no verdict; "" if there is one.
    """

    gradients: tuple[GradientAccuracy, ...] = ()
    operations: tuple[Operation, ...] = ()
    lowest_exponent: int = 0
    highest_exponent: int = 0
    highest_is_bound: bool = False
    overflows_at: str = ""
    reference: int = 0
    tolerance: float = TOLERANCE
    in_use: tuple[float, str, float] | None = None
    batches: int = 0
    passes: int = 0
    unknown: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no other batch can change the verdict."""
        return bool(self.unknown or self.overflows_at)

    @property
    def ranked(self) -> list[GradientAccuracy]:
        """The gradients that a scale can be judged by, the worst at scale 1 first.

        One that overflows there says only that it does.
        """
        found = [
            each
            for each in self.gradients
            if not each.is_noise and each.errors.get(0, math.inf) < math.inf
        ]
        return sorted(found, key=lambda each: -each.excess_error(0))

    @property
    def worst_error(self) -> float:
        """The largest error of a finite gradient without scaling."""
        return max((each.excess_error(0) for each in self.ranked), default=0.0)

    @property
    def first_to_overflow(self) -> str:
        """The name of the largest gradient."""
        return max(self.gradients, key=lambda each: each.largest).name


def measure(
    run: GradientFunction,
    batches: Iterable[Any],
    *,
    tolerance: float = TOLERANCE,
    in_use: float | None = None,
    after_batch: Callable[[int], None] = lambda number: None,
) -> dict[str, Measurement]:
    """Measures each loss of a model.

    On each batch: a pass in float32, one in float16 at scale 1, and one at a second scale. If that
    leaves a question, as many more as it takes.

    Args:
        run: Computes a pass.
        batches: What to measure on.
        tolerance: How wrong a gradient may be, as a share of it.
        in_use: The loss scale that trains, or None.
        after_batch: Called after each batch with the number of batches so far.

    Returns:
        A measurement for each loss, by its name.
    """
    losses: dict[str, _Loss] = {}
    passes = _Passes(run)
    number = 0
    for number, batch in enumerate(batches, 1):
        passes.begin(batch)
        for name in list(passes.references):
            loss = losses.setdefault(name, _Loss(name, tolerance))
            if not loss.is_over:
                loss.add(passes, in_use)
        after_batch(number)
        if all(loss.is_over for loss in losses.values()):
            break
    return {
        name: dataclasses.replace(loss.result(), batches=number, passes=passes.count)
        for name, loss in losses.items()
    }


class _Passes:
    """The passes of one batch, each computed once for all losses."""

    def __init__(self, run: GradientFunction) -> None:
        self._run = run
        self.count = 0

    def begin(self, batch: Any) -> None:
        """Computes the reference on a batch, whose passes follow."""
        self._batch = batch
        self.errors: dict[tuple[str, float], dict[str, float]] = {}
        self._raised: dict[tuple[int, int], dict[str, LossGradients]] = {}
        self.references = self._counted(0, False, watch=True)

    def at(self, name: str, exponent: float) -> dict[str, float]:
        """Returns the error of each gradient of a loss at a scale."""
        if (name, exponent) not in self.errors:
            found = self._counted(exponent, True, watch=exponent == 0)
            for each, reference in self.references.items():
                self.errors[each, exponent] = _errors(reference, found[each])
            if exponent == 0:
                # Gradients at other scales are not kept.
                self.unscaled = found
        return self.errors[name, exponent]

    def reference_at(self, exponent: int, number: int = 1) -> dict[str, LossGradients]:
        """Returns the passes in float32 at a loss scale, the first or another one."""
        if (exponent, number) not in self._raised:
            # Record ranges here as at scale 1, because a compiler may round differently without it.
            self._raised[exponent, number] = self._counted(exponent, False, watch=True)
        return self._raised[exponent, number]

    def compare_with(self, name: str, reference: LossGradients) -> None:
        """Takes another reference for a loss, and computes its errors again."""
        self.references[name] = reference._replace(outputs=self.references[name].outputs)
        tried = [exponent for each, exponent in self.errors if each == name]
        for exponent in tried:
            del self.errors[name, exponent]
        for exponent in tried:
            self.at(name, exponent)

    def _counted(
        self, exponent: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Computes a pass; the gradients that it returns are those of the loss, not scaled."""
        self.count += 1
        scale = 2.0**exponent
        # Overflow is measured here, so silence warnings of it.
        with np.errstate(all="ignore"):
            found = self._run(self._batch, scale, half, watch=watch)
        if scale == 1:
            return found
        return {
            name: each._replace(
                gradients={
                    key: None if g is None else np.asarray(g, np.float64) / scale
                    for key, g in each.gradients.items()
                }
            )
            for name, each in found.items()
        }


class _Loss:
    """Measures one loss, batch after batch."""

    def __init__(self, name: str, tolerance: float) -> None:
        self._name, self._tolerance = name, tolerance
        self._found = Measurement(tolerance=tolerance)
        self._rows: dict[str, GradientAccuracy] = {}
        self._operations: dict[str, Operation] = {}
        self._in_float32: set[str] = set()
        self._lowest = 0
        self._highest: int | None = None
        self._bound = self._assumed_highest = _HIGHEST
        self._needed = False

    @property
    def is_over(self) -> bool:
        """Whether no other batch can change the verdict."""
        return self._found.is_over

    def result(self) -> Measurement:
        """Returns the measurement."""
        found = dataclasses.replace(
            self._found,
            gradients=tuple(self._rows.values()),
            operations=tuple(self._operations.values()),
            lowest_exponent=self._lowest,
            highest_exponent=self._bound
            if self._highest is None
            else min(self._highest, self._assumed_highest),
            highest_is_bound=self._highest is None,
        )
        if not self.is_over and all(each.is_noise for each in found.gradients):
            found = dataclasses.replace(
                found,
                unknown="every gradient is wrong at every scale: either float16 computes none, or "
                f"{_RANDOM}",
            )
        return found

    def add(self, passes: _Passes, in_use: float | None) -> None:
        """Measures on a batch."""
        self._measure(passes)
        self._add_gradients(passes.references[self._name])
        if self.is_over:
            return
        if in_use is not None:
            self._add_in_use(passes, in_use)
        for (name, exponent), errors in passes.errors.items():
            # The scale in use may not be a power of two.
            if name == self._name and isinstance(exponent, int):
                self._add_errors(exponent, errors)

    def _measure(self, passes: _Passes) -> None:
        reference = passes.references[self._name]
        which = _not_finite(reference)
        if which:
            return self._stop(unknown=f"{which} is not finite in float32 already")
        try:
            passes.at(self._name, 0)
        except LossScaleError:
            raise
        # The model has run in float32, so the cause is float16; frameworks and models raise many
        # kinds of exceptions for that.
        except Exception as error:
            said = first_line(error, 200)
            return self._stop(unknown=f"the model does not run in float16 here: {said}")
        if overflowing := self._overflow(passes.unscaled[self._name], reference):
            return self._stop(overflows_at=overflowing)
        return self._measure_scales(passes)

    def _stop(self, **fields: Any) -> None:
        self._found = dataclasses.replace(self._found, **fields)

    # --- Forward --------------------------------------------------------------------------------

    def _overflow(self, narrow: LossGradients, wide: LossGradients) -> str:
        """Returns what overflows in the forward pass in float16 alone, "" if nothing does."""
        for name, output in narrow.outputs.items():
            in_float32 = wide.outputs.get(name)
            # A mask of infinities is infinite in float32 too.
            finite = output.finite or (in_float32 is not None and not in_float32.finite)
            room = _bits(output.largest)
            before = self._operations.get(name, Operation(name, room, finite))
            self._operations[name] = Operation(
                name, min(room, before.room), finite and before.finite
            )
            if not finite:
                return name
        return "" if math.isfinite(narrow.loss) else "the loss"

    # --- Backward -------------------------------------------------------------------------------

    def _measure_scales(self, passes: _Passes) -> None:
        at = functools.partial(passes.at, self._name)
        second = _second(_predicted_highest(_largest(passes.references[self._name])))
        at(second if self._highest is None else self._highest)
        self._check_reference(passes)
        largest = _largest(passes.references[self._name])
        if not self.is_over and not largest:
            self._stop(unknown="every gradient is 0")
        if self.is_over:
            return
        predicted = _predicted_highest(largest)
        if not self._needed:
            self._look_for_best(passes, NOISE)
            has_room = second >= MARGIN and _all_finite(at(second))
            if has_room and self._wrong(passes, 0) <= self._tolerance:
                self._bound = min(self._bound, second)
                self._assumed_highest = min(self._assumed_highest, max(predicted, second))
                return
            self._needed = True

        def finite(exponent: int) -> bool:
            return _all_finite(at(exponent))

        # From later batches, keep only what is worse.
        most = _HIGHEST if self._highest is None else self._highest
        self._highest = _highest_finite(
            finite, most, start=predicted if self._highest is None else most
        )
        wrong = self._wrong(passes, 0)
        self._look_for_best(passes, self._tolerance if wrong > self._tolerance else NOISE)
        if self._lowest > 0:
            at(self._lowest)
        if self._wrong(passes, max(self._lowest, 0)) > self._tolerance:
            self._lowest = self._find_lowest(passes)

    def _check_reference(self, passes: _Passes) -> None:
        """Takes the reference at a higher loss scale if it depends on that, which float32 does not.

        A model that casts to float16 itself casts in the reference too. Small gradients become 0
        there, and 0 or wrong by much beside those of float16.
        """
        reference = passes.references[self._name]
        doubtful = self._doubtful(passes)
        if not doubtful - self._in_float32:
            return None
        exponent = max(_predicted_highest(_largest(reference)) - MARGIN, _SECOND)
        raised = passes.reference_at(exponent)[self._name]
        # The loss itself is not scaled.
        if abs(raised.loss - reference.loss) > _SAME * abs(reference.loss):
            return self._stop(unknown=_RANDOM)
        wrong = doubtful
        if not _not_finite(raised):
            changed = _differing(raised, reference)
            if changed:
                # Rounding that differs between equal passes, as in sums on a GPU, is not a cast.
                changed -= _differing(raised, passes.reference_at(exponent, 2)[self._name])
            if not changed:
                self._in_float32 |= {name for name in doubtful if np.any(raised.gradients[name])}
                return None
            # If a scale is accurate, the scale two bits lower is nearly so.
            lower = _errors(raised, passes.reference_at(exponent - 2)[self._name])
            wrong = {name for name in changed if lower[name] > self._tolerance}
        if wrong:
            return self._stop(
                unknown="the model casts to float16 itself, and its float32 gradients change with "
                f"the loss scale up to 2**{exponent}: first {min(wrong)}"
            )
        self._stop(reference=exponent)
        return passes.compare_with(self._name, raised)

    def _doubtful(self, passes: _Passes) -> set[str]:
        """Names of gradients that are 0 in the reference, or differ from it in float16."""
        gradients = passes.references[self._name].gradients
        zero = {n for n, g in gradients.items() if g is not None and g.size and not np.any(g)}
        found = [errors for (name, _), errors in passes.errors.items() if name == self._name]
        return zero | {
            name for errors in found for name, e in errors.items() if self._tolerance < e < math.inf
        }

    def _look_for_best(self, passes: _Passes, error_from: float) -> None:
        """Tries higher scales while a gradient with such an error may have its best one there."""
        for _ in range(2):
            tried = [e for name, e in passes.errors if name == self._name]
            reference = passes.references[self._name].gradients
            waiting = [
                _predicted_highest(float(np.abs(reference[name]).max())) - 1
                for name, error in self._best(passes).items()
                if error >= error_from
            ]
            higher = [min(exponent, _HIGHEST) for exponent in waiting if exponent > max(tried)]
            if not higher:
                return
            passes.at(self._name, min(higher))

    def _find_lowest(self, passes: _Passes) -> int:
        """The lowest exponent at which no gradient is wrong by more than the tolerance."""
        while True:
            tried = [e for name, e in passes.errors if name == self._name and e >= 0]
            low = int(max(e for e in tried if self._wrong(passes, e) > self._tolerance))
            high = int(min((e for e in tried if e > low), default=_HIGHEST))
            if high - low <= 1:
                return high
            passes.at(self._name, (low + high) // 2)

    def _best(self, passes: _Passes) -> dict[str, float]:
        found: dict[str, float] = {}
        for (name, _), errors in passes.errors.items():
            if name == self._name:
                for variable, error in errors.items():
                    found[variable] = min(found.get(variable, math.inf), error)
        return found

    def _wrong(self, passes: _Passes, exponent: float) -> float:
        """The worst error at a scale.

        A gradient that overflows says nothing here: it limits `highest_exponent`.
        """
        found = self._errors_beyond(passes, exponent).values()
        return max(filter(math.isfinite, found), default=0.0)

    def _errors_beyond(self, passes: _Passes, exponent: float) -> dict[str, float]:
        """Errors at a scale beyond what float16 makes of each gradient anyway; without noise."""
        errors, best = passes.at(self._name, exponent), self._best(passes)
        return {
            variable: _beyond(error, best[variable])
            for variable, error in errors.items()
            if best[variable] < NOISE
        }

    # --- Rows -----------------------------------------------------------------------------------

    def _add_in_use(self, passes: _Passes, scale: float) -> None:
        wrong = self._errors_beyond(passes, math.log2(scale))
        worst = max(wrong, key=lambda name: wrong[name], default="")
        before = self._found.in_use
        if worst and (before is None or wrong[worst] > before[2]):
            self._stop(in_use=(scale, worst, wrong[worst]))

    def _add_gradients(self, reference: LossGradients) -> None:
        for name, gradient in reference.gradients.items():
            if gradient is None:
                continue
            largest = float(np.abs(gradient).max(initial=0))
            found = GradientAccuracy(
                name, gradient.size, largest, {}, _rounded_to_bfloat16(gradient)
            )
            before = self._rows.get(name, found)
            self._rows[name] = dataclasses.replace(
                before,
                largest=max(found.largest, before.largest),
                bfloat16=max(found.bfloat16, before.bfloat16),
            )

    def _add_errors(self, exponent: int, errors: Mapping[str, float]) -> None:
        for name, error in errors.items():
            before = self._rows[name]
            worst = {**before.errors, exponent: max(error, before.errors.get(exponent, 0.0))}
            self._rows[name] = dataclasses.replace(before, errors=dict(sorted(worst.items())))


def _highest_finite(finite: Callable[[int], bool], most: int, start: int) -> int:
    """Returns the highest exponent up to `most` for which gradients are finite."""
    exponent = max(min(start, most), -_HIGHEST)
    if finite(exponent):
        while exponent < most and finite(exponent + 1):
            exponent += 1
        return exponent
    step = 1
    # Grow the step: a gradient may overflow far below the estimate from float32.
    while exponent > -_HIGHEST and not finite(max(exponent - step, -_HIGHEST)):
        exponent = max(exponent - step, -_HIGHEST)
        step *= 2
    low, high = max(exponent - step, -_HIGHEST), exponent
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return low


def _errors(reference: LossGradients, found: LossGradients) -> dict[str, float]:
    """The error of each gradient that is not 0 in float32; infinite for one that overflows."""
    errors = {}
    for name, gradient in reference.gradients.items():
        narrow = found.gradients.get(name)
        if gradient is None or narrow is None:
            continue
        norm, difference = _norm(gradient), _norm(np.asarray(narrow, np.float64) - gradient)
        if not math.isfinite(difference):
            errors[name] = math.inf
        elif norm:
            errors[name] = difference / norm
    return errors


def _differing(one: LossGradients, other: LossGradients) -> set[str]:
    return {name for name, error in _errors(one, other).items() if error > _SAME}


def _norm(array: Any) -> float:
    wide = np.asarray(array, np.float64).ravel()
    return float(np.sqrt(np.dot(wide, wide)))


def _beyond(error: float, best: float) -> float:
    if math.isinf(error):
        return math.inf
    return math.sqrt(max(error**2 - best**2, 0.0))


def _all_finite(errors: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, errors.values()))


def _not_finite(found: LossGradients) -> str:
    """Returns what of a pass is not finite, "" if all of it is."""
    if not math.isfinite(found.loss):
        return "the loss"
    numbers = [g for g in found.gradients.values() if g is not None]
    return "" if all(np.isfinite(g).all() for g in numbers) else "a gradient"


def _largest(found: LossGradients) -> float:
    """The largest magnitude in all gradients, 0 if there is none."""
    sizes = [float(np.abs(g).max(initial=0)) for g in found.gradients.values() if g is not None]
    return max(sizes, default=0.0)


def _predicted_highest(largest: float) -> int:
    """Where a gradient of float32 overflows, which that of float16 nearly always does as well."""
    if not largest:
        return _FAR
    return max(min(math.floor(math.log2(_LARGEST / largest)), _HIGHEST), -_HIGHEST)


def _second(predicted: int) -> int:
    """The second scale to try: high enough to mend what is too small, with room to overflow."""
    return min(max(predicted, MARGIN), _SECOND) if predicted >= 0 else predicted


def _bits(magnitude: float) -> float:
    """The bits between a magnitude and the largest number of float16."""
    return math.log2(_LARGEST) - math.log2(magnitude) if magnitude > 0 else math.inf


def _rounded_to_bfloat16(gradient: Any) -> float:
    """The error of a gradient in bfloat16: 8 bits, and the range of float32."""
    narrow = np.asarray(gradient, np.float32)
    # Add half of the last kept bit; the carry gives the next number.
    rounded = ((narrow.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    norm = _norm(narrow)
    return _norm(rounded - narrow) / norm if norm and math.isfinite(norm) else 0.0

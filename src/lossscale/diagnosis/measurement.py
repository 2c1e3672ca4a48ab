"""Measures the accuracy of float16 gradients by comparing a few passes.

A framework computes the passes; the rest of a diagnosis is framework-independent and uses NumPy.
Loss scales are powers of two here, and are written as their exponents. The error of a gradient is
the norm of its difference from the float32 gradient, over the norm of the float32 gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lossscale.checks import checked_count, checked_number
from lossscale.diagnosis.gradient_function import (
    LARGEST,
    LOSS,
    GradientFunction,
    LossGradients,
    OutputRange,
)
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError, first_line

TOLERANCE = 0.1
"""The largest accepted error of a gradient. An error doubles with each bit that gradients shrink in
training: this leaves two bits before it is half of the gradient."""
NOISE = 0.5
"""A gradient whose error is at least this at every scale is noise, such as that of a bias before a
normalization, which is 0 except for rounding."""
MARGIN = 4
"""Bits that gradients should stay below overflow: they grew by up to 5 in training."""

_HIGHEST = 126
"""The exponent of the largest scale; the smallest scale is its reciprocal."""
_SECOND = 8
"""The exponent of the second scale: an error that scaling fixes is 256 times smaller there."""
_FAR = 36
"""The highest exponent to try if no gradient shows how large gradients are."""
_SAME = 0.01
"""Float32 gradients whose difference between two loss scales is larger depend on the scale."""
_RANDOM = "the loss draws different random numbers in each pass"


@dataclasses.dataclass(frozen=True)
class GradientAccuracy:
    """The accuracy of the gradient of one variable in float16, by loss scale.

    Attributes:
        name: The name of the variable.
        elements: The number of its elements.
        largest: The largest magnitude in the unscaled float32 gradient.
        errors: Exponent of each tried loss scale to the relative error there, the worst of all
            batches; infinite if the gradient overflows. Empty if it is 0 in float32.
        bfloat16: The relative error if the gradient is rounded to bfloat16.
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
class Measurement:
    """The measurement of one loss.

    Attributes:
        gradients: The accuracy of each gradient, in the order of the variables.
        operations: Name of each operation that returned float16 to the worst range of its output,
            in the order of the forward pass. It counts as finite if float32 is not finite either,
            as in a mask of infinities.
        lowest_exponent: That of the lowest scale at which every gradient is right; 0 for 0 or less.
        highest_exponent: That of the highest scale at which every gradient is finite.
        highest_is_estimate: Whether it follows from the sizes in float32: no overflow was tried.
        overflows_at: Name of the operation, or "the loss", that overflows in float16; "" if none.
        reference: The exponent of the loss scale at which the float32 gradients were computed: 0,
            or higher for a model that casts to float16 itself.
        tolerance: The largest accepted error.
        batches: The number of batches.
        passes: The number of forward and backward passes.
        unknown: The reason why there is no verdict; "" if there is one.
    """

    gradients: tuple[GradientAccuracy, ...] = ()
    operations: Mapping[str, OutputRange] = dataclasses.field(default_factory=dict)
    lowest_exponent: int = 0
    highest_exponent: int = _HIGHEST
    highest_is_estimate: bool = True
    overflows_at: str = ""
    reference: int = 0
    tolerance: float = TOLERANCE
    batches: int = 0
    passes: int = 0
    unknown: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no other batch can change the verdict."""
        return bool(self.unknown or self.overflows_at)

    @property
    def ranked(self) -> list[GradientAccuracy]:
        """The gradients by which a scale can be judged, the worst at scale 1 first.

        A gradient that overflows at scale 1 has no error there to rank.
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
    max_batches: int = 2,
    tolerance: float = TOLERANCE,
) -> dict[str, Measurement]:
    """Measures each loss of a model.

    Each batch takes a pass in float32, one in float16 at scale 1, and one at a second scale; and
    more passes if these leave a question open.

    Args:
        run: Computes a pass.
        batches: The batches to measure on.
        max_batches: The largest number of batches.
        tolerance: The largest accepted error of a gradient.

    Returns:
        A measurement for each loss, by its name.

    Raises:
        ArgumentTypeError: If `batches` is a batch, or not an iterable.
        ArgumentError: If it is empty, or another argument is out of range.
    """
    if not 0 < checked_number("tolerance", tolerance) < 1:
        raise ArgumentError(
            "`tolerance` must be a number between 0 and 1, such as 0.1 for 10%. "
            f"Received: tolerance={tolerance!r}."
        )
    measurements: dict[str, Measurement] = {}
    number = passes = 0
    for given in itertools.islice(_iterated(batches), checked_count("max_batches", max_batches)):
        number += 1
        batch = _Batch(run, given, tolerance)
        for name, loss in batch.losses.items():
            before = measurements.get(name, Measurement(tolerance=tolerance))
            measurements[name] = before if before.is_over else loss.measured(before)
        passes += batch.passes
        if all(found.is_over for found in measurements.values()):
            break
    if not number:
        raise ArgumentError(
            "`batches` must contain at least one batch. Received: an empty "
            f"{type(batches).__name__}."
        )
    for name, found in measurements.items():
        unknown = found.unknown
        if not found.is_over and all(each.is_noise for each in found.gradients):
            either = "either float16 computes none, or"
            unknown = f"every gradient is wrong at every scale: {either} {_RANDOM}"
        measurements[name] = dataclasses.replace(
            found, unknown=unknown, batches=number, passes=passes
        )
    return measurements


def _iterated(batches: Any) -> Iterator[Any]:
    """Returns an iterator over `batches`, if it is an iterable of batches."""
    parts = batches if isinstance(batches, tuple) else [batches]
    is_batch = isinstance(batches, Mapping) or any(hasattr(part, "shape") for part in parts)
    if is_batch or not hasattr(batches, "__iter__"):
        shape = f" of shape {tuple(batches.shape)}" if hasattr(batches, "shape") else ""
        raise ArgumentTypeError(
            "`batches` must be an iterable of batches, such as a list or a DataLoader; one batch "
            f"is [batch]. Received: a {type(batches).__name__}{shape}."
        )
    batch_by_batch: Iterator[Any] = iter(batches)
    return batch_by_batch


class _Batch:
    """The passes on one batch, each computed once for all losses."""

    def __init__(self, run: GradientFunction, batch: Any, tolerance: float) -> None:
        self._run, self._batch = run, batch
        self.passes = 0
        self.losses = {
            name: _Loss(self, name, reference, tolerance)
            for name, reference in self.gradients(0, half=False).items()
        }

    def gradients(self, exponent: int, *, half: bool) -> dict[str, LossGradients]:
        """Computes a pass; divides the gradients that it returns by the loss scale."""
        self.passes += 1
        scale = 2.0**exponent
        # A compiler may round differently if it also returns ranges, so all reference passes do.
        watch = exponent == 0 or not half
        of_python, of_numpy = random.getstate(), np.random.get_state()
        try:
            # Overflow is measured here, so silence warnings of it.
            with np.errstate(all="ignore"):
                found = self._run(self._batch, scale, half, watch=watch)
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
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

    def add_errors(self, exponent: int) -> None:
        """Computes the errors of all losses at a scale; only these are kept of the gradients."""
        found = self.gradients(exponent, half=True)
        for name, loss in self.losses.items():
            loss.add_errors(exponent, found[name])


class _Loss:
    """One loss on one batch: the errors of its gradients at the scales that were tried."""

    def __init__(
        self, batch: _Batch, name: str, reference: LossGradients, tolerance: float
    ) -> None:
        if all(gradient is None for gradient in reference.gradients.values()):
            raise ArgumentError(
                f"The loss{'' if name == LOSS else f' {name!r}'} depends on no trainable "
                "parameter. Compute it from the model or the parameters that `loss_fn` receives, "
                "without detaching it."
            )
        self._batch, self._name = batch, name
        self._reference, self._tolerance = reference, tolerance
        self._errors: dict[int, dict[str, float]] = {}

    def measured(self, before: Measurement) -> Measurement:
        """Returns the measurement on earlier batches with this batch added."""
        found = self._forward(before)
        if not found.is_over:
            found = self._backward(found)
        return dataclasses.replace(found, gradients=self._rows(found))

    def add_errors(self, exponent: int, narrow: LossGradients) -> None:
        """Adds the errors of a pass in float16."""
        self._errors[exponent] = _errors(self._reference, narrow)
        if exponent == 0:
            self._narrow = narrow._replace(gradients={})

    def _at(self, exponent: int) -> dict[str, float]:
        """The error of each gradient at a scale, which is tried if it was not."""
        if exponent not in self._errors:
            self._batch.add_errors(exponent)
        return self._errors[exponent]

    def _forward(self, before: Measurement) -> Measurement:
        """Measures the forward pass."""
        if which := _not_finite(self._reference):
            unknown = f"{which} is not finite in float32 already"
            return dataclasses.replace(before, unknown=unknown)
        try:
            self._at(0)
        except LossScaleError:
            raise
        # The model has run in float32, so the cause is float16; frameworks and models raise many
        # kinds of exceptions for that.
        except Exception as error:
            unknown = f"the model does not run in float16 here: {first_line(error, 200)}"
            return dataclasses.replace(before, unknown=unknown)
        operations, overflows_at = dict(before.operations), ""
        for name, output in self._narrow.outputs.items():
            in_float32 = self._reference.outputs.get(name)
            finite = output.finite or (in_float32 is not None and not in_float32.finite)
            largest = max(output.largest, operations.get(name, output).largest)
            operations[name] = OutputRange(largest, finite)
            if not finite:
                overflows_at = name
                break
        if not overflows_at and not math.isfinite(self._narrow.loss):
            overflows_at = "the loss"
        return dataclasses.replace(before, operations=operations, overflows_at=overflows_at)

    def _backward(self, before: Measurement) -> Measurement:
        """Measures the lowest and the highest scale; of later batches, only the worse counts."""
        second = before.highest_exponent
        if before.highest_is_estimate:
            predicted = _predicted_highest(_largest(self._reference))
            second = predicted if predicted < 0 else min(max(predicted, MARGIN), _SECOND)
        self._at(second)
        before = self._with_right_reference(before)
        if before.is_over:
            return before
        largest = _largest(self._reference)
        if not largest:
            return dataclasses.replace(before, unknown="every gradient is 0")
        predicted = _predicted_highest(largest)
        if before.highest_is_estimate:
            self._try_higher(NOISE)
            has_room = second >= MARGIN and self._is_finite(second)
            if has_room and self._worst(0) <= self._tolerance:
                highest = min(before.highest_exponent, max(predicted, second))
                return dataclasses.replace(before, highest_exponent=highest)
        most = before.highest_exponent
        start = predicted if before.highest_is_estimate else most
        highest = _highest_finite(self._is_finite, most, start)
        self._try_higher(self._tolerance if self._worst(0) > self._tolerance else NOISE)
        lowest = before.lowest_exponent
        if self._worst(lowest) > self._tolerance:
            lowest = self._find_lowest()
        return dataclasses.replace(
            before, lowest_exponent=lowest, highest_exponent=highest, highest_is_estimate=False
        )

    def _with_right_reference(self, before: Measurement) -> Measurement:
        """Takes the reference at a higher loss scale if it depends on the scale.

        A model that casts to float16 itself casts in the reference too. Small gradients become 0
        there, or wrong by much.
        """
        gradients = self._reference.gradients
        doubtful = {n for n, g in gradients.items() if g is not None and g.size and not np.any(g)}
        for errors in self._errors.values():
            doubtful |= {name for name, e in errors.items() if self._tolerance < e < math.inf}
        if not doubtful:
            return before
        exponent = max(_predicted_highest(_largest(self._reference)) - MARGIN, _SECOND)
        raised = self._reference_at(exponent)
        if abs(raised.loss - self._reference.loss) > _SAME * abs(self._reference.loss):
            return dataclasses.replace(before, unknown=_RANDOM)
        wrong = doubtful
        if not _not_finite(raised):
            changed = _differing(raised, self._reference)
            if changed:
                # Rounding that differs between equal passes, as in sums on a GPU, is not a cast.
                changed -= _differing(raised, self._reference_at(exponent))
            if not changed:
                return before
            # If a scale is accurate, the scale two bits lower is nearly so.
            lower = _errors(raised, self._reference_at(exponent - 2))
            wrong = {name for name in changed if lower[name] > self._tolerance}
        if wrong:
            unknown = (
                "the model casts to float16 itself, and its float32 gradients change with the loss "
                f"scale up to 2**{exponent}: first {min(wrong)}"
            )
            return dataclasses.replace(before, unknown=unknown)
        self._reference = raised
        tried = list(self._errors)
        self._errors.clear()
        for each in tried:
            self._at(each)
        return dataclasses.replace(before, reference=exponent)

    def _reference_at(self, exponent: int) -> LossGradients:
        return self._batch.gradients(exponent, half=False)[self._name]

    def _try_higher(self, error_from: float) -> None:
        """Tries higher scales while a gradient with such an error may have its best scale there."""
        for _ in range(2):
            gradients = self._reference.gradients
            waiting = [
                _predicted_highest(float(np.abs(gradients[name]).max())) - 1
                for name, error in self._best().items()
                if error >= error_from
            ]
            higher = [each for each in waiting if each > max(self._errors)]
            if not higher:
                return
            self._at(min(higher))

    def _find_lowest(self) -> int:
        """The lowest exponent at which no gradient is wrong by more than the tolerance."""
        while True:
            tried = [each for each in self._errors if each >= 0]
            low = max(each for each in tried if self._worst(each) > self._tolerance)
            high = min((each for each in tried if each > low), default=_HIGHEST)
            if high - low <= 1:
                return high
            self._at((low + high) // 2)

    def _is_finite(self, exponent: int) -> bool:
        return all(map(math.isfinite, self._at(exponent).values()))

    def _best(self) -> dict[str, float]:
        """The smallest error of each gradient at any scale that was tried."""
        found: dict[str, float] = {}
        for errors in self._errors.values():
            found |= {name: min(e, found.get(name, math.inf)) for name, e in errors.items()}
        return found

    def _worst(self, exponent: int) -> float:
        """The worst error at a scale beyond the best of each gradient; without noise.

        A gradient that overflows does not count: it limits the highest scale.
        """
        errors, best = self._at(exponent), self._best()
        beyond = [_beyond(e, best[name]) for name, e in errors.items() if best[name] < NOISE]
        return max(filter(math.isfinite, beyond), default=0.0)

    def _rows(self, found: Measurement) -> tuple[GradientAccuracy, ...]:
        """The gradients of a measurement with those of this batch added."""
        rows = {each.name: each for each in found.gradients}
        for name, gradient in self._reference.gradients.items():
            if gradient is None:
                continue
            before = rows.get(name, GradientAccuracy(name, gradient.size, 0.0, {}, 0.0))
            errors = dict(before.errors)
            if not found.is_over:
                for exponent, each in self._errors.items():
                    if name in each:
                        errors[exponent] = max(each[name], errors.get(exponent, 0.0))
            rows[name] = dataclasses.replace(
                before,
                largest=max(float(np.abs(gradient).max(initial=0)), before.largest),
                errors=dict(sorted(errors.items())),
                bfloat16=max(_rounded_to_bfloat16(gradient), before.bfloat16),
            )
        return tuple(rows.values())


def _highest_finite(finite: Callable[[int], bool], most: int, start: int) -> int:
    """Returns the highest exponent up to `most` at which gradients are finite."""
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


def _arrays(found: LossGradients) -> Sequence[Any]:
    return [gradient for gradient in found.gradients.values() if gradient is not None]


def _not_finite(found: LossGradients) -> str:
    """Returns the part of a pass that is not finite, "" if there is none."""
    if not math.isfinite(found.loss):
        return "the loss"
    return "" if all(np.isfinite(each).all() for each in _arrays(found)) else "a gradient"


def _largest(found: LossGradients) -> float:
    """The largest magnitude in all gradients, 0 if there is none."""
    return max((float(np.abs(each).max(initial=0)) for each in _arrays(found)), default=0.0)


def _predicted_highest(largest: float) -> int:
    """The highest scale at which a gradient of that size fits into float16, by its exponent."""
    if not largest:
        return _FAR
    return max(min(math.floor(math.log2(LARGEST / largest)), _HIGHEST), -_HIGHEST)


def _rounded_to_bfloat16(gradient: Any) -> float:
    """The error of a gradient in bfloat16: 8 bits, and the range of float32."""
    narrow = np.asarray(gradient, np.float32)
    # Add half of the last kept bit; the carry gives the next number.
    bits = (narrow.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    norm = _norm(narrow)
    difference = _norm(bits.view(np.float32) - narrow)
    return difference / norm if norm and math.isfinite(norm) else 0.0

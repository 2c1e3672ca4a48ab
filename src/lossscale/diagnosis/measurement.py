"""Three numbers of a model: how wrong gradients are, where they overflow, what room outputs have.

Scales are powers of two here, and named by their exponents. A gradient is compared with that of
float32: its error is the norm of the difference over the norm.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from lossscale.diagnosis.passes import MODEL, Output, Pass, Run
from lossscale.errors import LossScaleError, first_line

TOLERANCE = 0.1
"""How wrong a gradient may be. An error doubles with each bit that gradients shrink in training:
this leaves two bits before it is half of the gradient."""
NOISE = 0.5
"""A gradient that is wrong by this at every scale is noise, such as that of a bias before a
normalization, which is 0 but for rounding."""
MARGIN = 4
"""How many bits gradients should stay below overflow: they grew by up to 5 in training."""
NEAR = 3
"""An operation with fewer bits of room than this is near the end of float16."""

_LARGEST = 65504.0
_HIGHEST = 126
"""The exponent of the largest scale; the smallest one is its reciprocal."""
_SECOND = 8
"""Of the second scale: an error that scaling mends is a 256th there."""
_PROBES = 6
"""How many scales are tried at most to find `bottom` on one batch."""
_SPREAD = 36
"""Bits from where a gradient overflows to where one of numbers alike is lost."""
_CREDIBLE = 0.99
"""What has to become of a loss where an output is moved to where the loss should be 0."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What float16 makes of the gradient of one variable.

    Attributes:
        name: The name of the variable.
        elements: How many numbers it has.
        largest: The largest magnitude in it in float32, the loss not scaled.
        errors: Exponent of each loss scale that was tried to the relative error there, the worst
            of all batches; infinite where it overflows.
        bfloat16: The relative error if it is rounded to bfloat16.
    """

    name: str
    elements: int
    largest: float
    errors: Mapping[int, float]
    bfloat16: float

    @property
    def best(self) -> float:
        """The error at the scale where it is the smallest: what float16 makes of it anyway."""
        return min(self.errors.values(), default=math.inf)

    @property
    def is_noise(self) -> bool:
        """Whether float16 gets it wrong at every scale, so that it says nothing about one."""
        return self.best >= NOISE

    def wrong_at(self, exponent: int) -> float:
        """Returns the error at a scale that was tried beyond that at its best scale."""
        return _beyond(self.errors[exponent], self.best)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What an operation of the forward pass leaves of the range of float16.

    Attributes:
        name: Its name; `MODEL` is all that the model returns.
        room: Bits between the largest number that it returned and 65,504.
        reach: Bits between the largest that it has to return for a loss of 0 and 65,504; negative
            beyond. NaN where that is not known.
        finite: Whether float16 loses nothing to infinity that float32 keeps.
    """

    name: str
    room: float
    reach: float
    finite: bool


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of one loss.

    Attributes:
        gradients: Those of the variables, in their order.
        operations: Those whose results are float16, in their order; empty if none was watched.
        bottom: The lowest exponent of a scale where every gradient is right; 0 for 0 or less.
        top: The highest one where every gradient is finite.
        top_is_bound: Whether nothing higher than `top` was tried.
        ends_at: Name of the operation, or "the loss", where float16 ends; "" if nowhere.
        needs: What that operation would have to return, as a magnitude; infinite where it is not
            finite already.
        tolerance: How wrong a gradient may be.
        in_use: The loss scale that trains, and the name and error of the worst gradient there.
        batches: How many batches were measured on.
        passes: How many forward and backward passes that took.
        unknown: Why there is no verdict; "" if there is one.
    """

    gradients: tuple[Gradient, ...] = ()
    operations: tuple[Operation, ...] = ()
    bottom: int = 0
    top: int = 0
    top_is_bound: bool = False
    ends_at: str = ""
    needs: float = math.inf
    tolerance: float = TOLERANCE
    in_use: tuple[float, str, float] | None = None
    batches: int = 0
    passes: int = 0
    unknown: str = ""

    @property
    def voting(self) -> list[Gradient]:
        """The gradients that say something about a scale, the worst at scale 1 first.

        One that overflows there says only that it does.
        """
        found = [
            each
            for each in self.gradients
            if not each.is_noise and each.errors.get(0, math.inf) < math.inf
        ]
        return sorted(found, key=lambda each: -each.wrong_at(0))

    @property
    def wrong(self) -> float:
        """How wrong the worst gradient is without scaling, of those that are finite."""
        return max((each.wrong_at(0) for each in self.voting), default=0.0)

    @property
    def first_to_overflow(self) -> str:
        """The name of the largest gradient."""
        return max(self.gradients, key=lambda each: each.largest).name


def measure(
    run: Run,
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
        tolerance: How wrong a gradient may be, dimensionless.
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
        for name, reference in passes.references.items():
            loss = losses.setdefault(name, _Loss(name, tolerance))
            if not loss.is_over:
                loss.add(passes, reference, in_use)
        after_batch(number)
        if all(loss.is_over for loss in losses.values()):
            break
    for loss in losses.values():
        loss.find_missing_tops(passes)
    return {
        name: dataclasses.replace(loss.result(), batches=number, passes=passes.count)
        for name, loss in losses.items()
    }


class _Passes:
    """The passes of one batch, each computed once for all losses."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.count = 0

    def begin(self, batch: Any) -> None:
        """Computes the reference on a batch, whose passes follow."""
        self.batch = batch
        self.errors: dict[tuple[str, float], dict[str, float]] = {}
        self.references = self._counted(1.0, False, watch=True)

    def at(self, name: str, exponent: float) -> dict[str, float]:
        """Returns the error of each gradient of a loss at a scale."""
        if (name, exponent) not in self.errors:
            scale = 2.0**exponent
            found = self._counted(scale, True, watch=exponent == 0)
            for each, reference in self.references.items():
                self.errors[each, exponent] = _errors(reference, found[each], scale)
            if exponent == 0:
                # The gradients of other scales are not kept.
                self.unscaled = found
        return self.errors[name, exponent]

    def raise_reference(self, exponent: int) -> None:
        """Takes the reference at a scale where float16 loses least, and compares with that."""
        scale = 2.0**exponent
        raised = self._counted(scale, False)
        for name, found in raised.items():
            gradients = {
                key: None if g is None else np.asarray(g, np.float64) / scale
                for key, g in found.gradients.items()
            }
            self.references[name] = self.references[name]._replace(gradients=gradients)
        tried = {exponent for _, exponent in self.errors}
        self.errors.clear()
        for each in tried:
            for name in raised:
                self.at(name, each)

    def is_finite(self, batch: Any, name: str, exponent: int) -> bool:
        """Whether every gradient is finite at a scale, on a batch that has no reference now."""
        found = self._counted(2.0**exponent, True, batch=batch)
        return all(np.isfinite(g).all() for g in found[name].gradients.values() if g is not None)

    def moved(self, name: str, output: str) -> float:
        """Returns the loss with an output where it has to be for a loss of 0."""
        return self._counted(1.0, False, move=output)[name].loss

    def _counted(
        self, scale: float, half: bool, *, batch: Any = None, **keywords: Any
    ) -> dict[str, Pass]:
        self.count += 1
        # An overflow is what is looked for.
        with np.errstate(all="ignore"):
            return self._run(self.batch if batch is None else batch, scale, half, **keywords)


class _Loss:
    """What is found of one loss, batch after batch."""

    def __init__(self, name: str, tolerance: float) -> None:
        self._name, self._tolerance = name, tolerance
        self._found = Measurement(tolerance=tolerance)
        self._rows: dict[str, Gradient] = {}
        self._operations: dict[str, Operation] = {}
        self._bottom = 0
        self._top: int | None = None
        self._bound = _HIGHEST
        self._open: list[tuple[Any, int]] = []
        self._needed = False

    @property
    def is_over(self) -> bool:
        """Whether no other batch can change the verdict."""
        return bool(self._found.unknown or self._found.ends_at)

    def result(self) -> Measurement:
        top = self._top
        found = dataclasses.replace(
            self._found,
            gradients=tuple(self._rows.values()),
            operations=tuple(self._operations.values()),
            bottom=self._bottom,
            top=self._bound if top is None else top,
            top_is_bound=top is None,
        )
        if not self.is_over and all(each.is_noise for each in found.gradients):
            found = dataclasses.replace(
                found,
                unknown="every gradient is wrong at every scale: either float16 computes none, or "
                "the loss draws random numbers that are others in each pass",
            )
        return found

    def add(self, passes: _Passes, reference: Pass, in_use: float | None) -> None:
        """Measures on a batch.

        Args:
            passes: Those of the batch.
            reference: That in float32.
            in_use: The loss scale that trains, or None.
        """
        given = reference
        self._add_gradients(reference)
        which = _not_finite(reference)
        if which:
            return self._stop(unknown=f"{which} is not finite in float32 already")
        try:
            passes.at(self._name, 0)
        except LossScaleError:
            raise
        # In float32 it has run, so that it is float16 that an operation does not take.
        except Exception as error:
            said = first_line(error, 200)
            return self._stop(unknown=f"the model does not run in float16 here: {said}")
        if self._ends(passes, reference):
            return None
        largest = _largest(reference)
        if not largest:
            # A model that computes in float16 whatever it is asked for may lose all of them.
            passes.raise_reference(MARGIN * _SECOND)
            reference = passes.references[self._name]
            largest = _largest(reference)
        if not 0 < largest < math.inf:
            return self._stop(unknown="every gradient is 0")
        self._look_at_scales(passes, _predicted_top(largest))
        if in_use is not None:
            self._add_in_use(passes, in_use)
        if passes.references[self._name] is not given:
            self._add_gradients(passes.references[self._name])
        for (name, exponent), errors in passes.errors.items():
            # The scale in use need not be a power of two.
            if name == self._name and isinstance(exponent, int):
                self._add_errors(exponent, errors)
        return None

    def find_missing_tops(self, passes: _Passes) -> None:
        """Finds where gradients overflow on batches that came before the first that asks."""
        if self.is_over or self._top is None:
            return
        for batch, predicted in self._open:
            if predicted < self._top + MARGIN:
                finite = functools.partial(passes.is_finite, batch, self._name)
                self._top = _highest(finite, self._top, start=self._top)

    def _stop(self, **fields: Any) -> None:
        self._found = dataclasses.replace(self._found, **fields)

    # --- Forward --------------------------------------------------------------------------------

    def _ends(self, passes: _Passes, reference: Pass) -> bool:
        """Whether float16 ends in the forward pass, by what it returns or has to return."""
        narrow = passes.unscaled[self._name]
        for name, output in narrow.outputs.items():
            wide = reference.outputs.get(name) or Output(output.largest, True)
            found = Operation(
                name,
                _bits(output.largest),
                _bits(wide.reach) if reference.loss > 0 else math.nan,
                output.finite or not wide.finite,
            )
            before = self._operations.get(name, found)
            self._operations[name] = Operation(
                name,
                min(found.room, before.room),
                # NaN is less than nothing.
                min((found.reach, before.reach), key=lambda r: math.inf if math.isnan(r) else r),
                found.finite and before.finite,
            )
            if not found.finite and name != MODEL:
                self._stop(ends_at=name)
                return True
        if not math.isfinite(narrow.loss):
            self._stop(ends_at="the loss")
            return True
        for name in narrow.outputs:
            found = self._operations[name]
            if not found.reach < 0 or not (name == MODEL or found.room < NEAR):
                continue
            # A constant in the loss asks for outputs that would not lower it.
            if passes.moved(self._name, name) < _CREDIBLE * reference.loss:
                self._stop(ends_at=name, needs=reference.outputs[name].reach)
                return True
        return False

    # --- Backward -------------------------------------------------------------------------------

    def _look_at_scales(self, passes: _Passes, predicted: int) -> None:
        at = functools.partial(passes.at, self._name)
        if not self._needed:
            second = min(max(predicted, MARGIN), _SECOND) if predicted >= 0 else predicted
            if self._reference_is_narrow(at(0), at(second)):
                passes.raise_reference(max(predicted - MARGIN, 0))
            self.look_for_best(passes, NOISE)
            has_room = second >= MARGIN and _all_finite(at(second))
            if has_room and self._wrong(passes, 0) <= self._tolerance:
                self._bound = min(self._bound, second)
                self._open.append((passes.batch, predicted))
                return
            self._needed = True

        def finite(exponent: int) -> bool:
            return _all_finite(at(exponent))

        # Of another batch only what is worse matters.
        most = _HIGHEST if self._top is None else self._top
        self._top = _highest(finite, most, start=predicted if self._top is None else most)
        wrong = self._wrong(passes, 0)
        self.look_for_best(passes, self._tolerance if wrong > self._tolerance else NOISE)
        if self._bottom > 0:
            at(self._bottom)
        if self._wrong(passes, max(self._bottom, 0)) > self._tolerance:
            self._bottom = self._find_bottom(passes)

    def _reference_is_narrow(self, one: Mapping[str, float], second: Mapping[str, float]) -> bool:
        """Whether the model computes in float16 whatever it is asked for.

        Then float16 is nearer to its reference at scale 1, where both lose the same.
        """
        return any(
            error < NOISE and error + self._tolerance < second.get(name, 0.0) < math.inf
            for name, error in one.items()
        )

    def look_for_best(self, passes: _Passes, error_from: float) -> None:
        """Tries higher scales while a gradient with such an error may have its best one there."""
        for _ in range(2):
            tried = [e for name, e in passes.errors if name == self._name]
            best = self._best(passes)
            reference = passes.references[self._name].gradients
            waiting = [
                _predicted_top(float(np.abs(reference[name]).max())) - 1
                for name, error in best.items()
                if error >= error_from
            ]
            higher = [min(exponent, _HIGHEST) for exponent in waiting if exponent > max(tried)]
            if not higher:
                return
            passes.at(self._name, min(higher))

    def _find_bottom(self, passes: _Passes) -> int:
        """The lowest exponent at which no gradient is wrong by more than the tolerance."""
        low, high = 0, _HIGHEST
        for probe in itertools.count():
            tried = sorted(e for name, e in passes.errors if name == self._name and e >= 0)
            wrong = {exponent: self._wrong(passes, exponent) for exponent in tried}
            low = int(max(e for e in tried if wrong[e] > self._tolerance))
            high = int(min((e for e in tried if e > low), default=_HIGHEST))
            if high - low <= 1 or probe == _PROBES:
                break
            guess = (low + high) // 2
            if wrong[low] < NOISE:
                # An error halves with each bit.
                guess = low + math.ceil(math.log2(wrong[low] / self._tolerance))
            elif probe == 0:
                guess = max(low + 1, self._predicted_top_of_wrong(passes, low) - _SPREAD)
            passes.at(self._name, min(max(guess, low + 1), high - 1))
        return high

    def _predicted_top_of_wrong(self, passes: _Passes, exponent: int) -> int:
        gradients, best = passes.references[self._name].gradients, self._best(passes)
        return max(
            _predicted_top(float(np.abs(gradients[variable]).max()))
            for variable, error in passes.at(self._name, exponent).items()
            if best[variable] < NOISE and _beyond(error, best[variable]) > self._tolerance
        )

    def _best(self, passes: _Passes) -> dict[str, float]:
        found: dict[str, float] = {}
        for (name, _), errors in passes.errors.items():
            if name == self._name:
                for variable, error in errors.items():
                    found[variable] = min(found.get(variable, math.inf), error)
        return found

    def _wrong(self, passes: _Passes, exponent: float) -> float:
        """The worst error at a scale.

        A gradient that overflows says nothing here: it is `top` that it limits.
        """
        found = self.wrong(passes, passes.at(self._name, exponent)).values()
        return max(filter(math.isfinite, found), default=0.0)

    def wrong(self, passes: _Passes, errors: Mapping[str, float]) -> dict[str, float]:
        """Returns errors beyond what float16 makes of each gradient anyway; noise is left out."""
        best = self._best(passes)
        return {
            variable: _beyond(error, best[variable])
            for variable, error in errors.items()
            if best[variable] < NOISE
        }

    def _add_in_use(self, passes: _Passes, scale: float) -> None:
        wrong = self.wrong(passes, passes.at(self._name, math.log2(scale)))
        worst = max(wrong, key=lambda name: wrong[name], default="")
        before = self._found.in_use
        if worst and (before is None or wrong[worst] > before[2]):
            self._stop(in_use=(scale, worst, wrong[worst]))

    def _add_gradients(self, reference: Pass) -> None:
        for name, gradient in reference.gradients.items():
            if gradient is None:
                continue
            largest = float(np.abs(gradient).max(initial=0))
            found = Gradient(name, gradient.size, largest, {}, _rounded_to_bfloat16(gradient))
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


def _highest(finite: Callable[[int], bool], most: int, start: int) -> int:
    """Returns the highest exponent up to `most` for which gradients are finite."""
    exponent = max(min(start, most), -_HIGHEST)
    if finite(exponent):
        while exponent < most and finite(exponent + 1):
            exponent += 1
        return exponent
    step = 1
    # In steps that grow: a gradient may overflow far below where that of float32 would.
    while exponent > -_HIGHEST and not finite(max(exponent - step, -_HIGHEST)):
        exponent = max(exponent - step, -_HIGHEST)
        step *= 2
    low, high = max(exponent - step, -_HIGHEST), exponent
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return low


def _errors(reference: Pass, found: Pass, scale: float) -> dict[str, float]:
    """The error of each gradient that is not 0 in float32; infinite for one that overflows."""
    errors = {}
    for name, gradient in reference.gradients.items():
        narrow = found.gradients.get(name)
        if gradient is None or narrow is None:
            continue
        norm, difference = _norm(gradient), _norm(np.asarray(narrow, np.float64) / scale - gradient)
        if not math.isfinite(difference):
            errors[name] = math.inf
        elif norm:
            errors[name] = difference / norm
    return errors


def _norm(array: Any) -> float:
    wide = np.asarray(array, np.float64).ravel()
    return float(np.sqrt(np.dot(wide, wide)))


def _beyond(error: float, best: float) -> float:
    if math.isinf(error):
        return math.inf
    return math.sqrt(max(error**2 - best**2, 0.0))


def _all_finite(errors: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, errors.values()))


def _not_finite(found: Pass) -> str:
    """What of a pass is not finite, "" if all of it is."""
    if not math.isfinite(found.loss):
        return "the loss"
    numbers = [g for g in found.gradients.values() if g is not None]
    return "" if all(np.isfinite(g).all() for g in numbers) else "a gradient"


def _largest(found: Pass) -> float:
    """The largest magnitude in all gradients, 0 if there is none."""
    sizes = [float(np.abs(g).max(initial=0)) for g in found.gradients.values() if g is not None]
    return max(sizes, default=0.0)


def _predicted_top(largest: float) -> int:
    """Where a gradient of float32 overflows, which that of float16 nearly always does as well."""
    return max(min(math.floor(math.log2(_LARGEST / largest)), _HIGHEST), -_HIGHEST)


def _bits(magnitude: float) -> float:
    """The bits between a magnitude and the largest number of float16."""
    if not magnitude > 0:
        # The largest of nothing but NaN is minus infinity on some processors.
        return math.inf if magnitude == 0 else math.nan
    return math.log2(_LARGEST) - math.log2(magnitude)


def _rounded_to_bfloat16(gradient: Any) -> float:
    """The error of a gradient in bfloat16: 8 bits, and the range of float32."""
    narrow = np.asarray(gradient, np.float32)
    # Half of the last bit that stays is added; what it carries to is the next number.
    rounded = ((narrow.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    norm = _norm(narrow)
    return _norm(rounded - narrow) / norm if norm and math.isfinite(norm) else 0.0

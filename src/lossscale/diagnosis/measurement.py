"""Measures the accuracy of float16 gradients by comparing a few passes.

A framework computes the passes; the rest of a diagnosis is framework-independent and uses NumPy.
Loss scales are powers of two here, and are written as their exponents. The error of a gradient is
the norm of its difference from the float32 gradient, over the norm of the float32 gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lossscale.checks import checked_count
from lossscale.common.random_states import kept_random_states
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError, first_line
from lossscale.explain.text import LARGEST, Cause, Explanation, not_explained
from lossscale.framework_types import Array

TOLERANCE = 0.1
"""The largest accepted error of a gradient. An error doubles with each bit that gradients shrink in
training: this leaves two bits before it is half of the gradient."""
NOISE = 0.5
"""A gradient whose error is at least this at every scale is wrong in float16."""
_ROUNDING = 2.0**-14
"""Of the largest number in all gradients: what is smaller and wrong is noise, such as the gradient
of a bias before a normalization, which is 0 except for rounding."""
MARGIN = 4
"""Bits that gradients should stay below overflow: they grew by up to 5 in training."""
TARGETS = "the targets"

_HIGHEST = 126
_SECOND = 8
"""The exponent of the second scale: an error that scaling fixes is 256 times smaller there."""
_FAR = 36
"""The highest exponent to try if no gradient shows how large gradients are."""
_SAME = 0.01
"""Float32 gradients whose difference between two loss scales is larger depend on the scale."""
_NOT_IN_FLOAT16 = "the model does not run in float16 here"
_RANDOM = "the loss draws different random numbers in each pass"

Batch = TypeVar("Batch", contravariant=True)


class Pass(NamedTuple):
    """The result of a forward and a backward pass.

    Attributes:
        loss: The unscaled loss.
        gradients: Name of each variable to the gradient of the scaled loss, a NumPy array of
            float32 (of a sparse gradient, the rows that it has); None if the loss does not depend
            on the variable.
        targets_fit: Whether the targets are finite in the dtypes of the outputs that they are
            compared with, as far as that is known.
    """

    loss: float
    gradients: Mapping[str, NDArray[np.float32] | None]
    targets_fit: bool = True


class GradientFunction(Protocol[Batch]):
    """Computes the gradients of a loss on a batch.

    It leaves the model, its optimizer and the framework's random states unchanged, bit for bit,
    also if the model raises. Each call draws the same random numbers, in float16 those of float32.
    """

    def __call__(self, batch: Batch, scale: float, half: bool) -> Pass:
        """Computes a pass in float16 or float32 of the loss, which is multiplied by `scale`."""

    def explain(self, batch: Batch, scale: float, half: bool) -> Explanation:
        """Explains why such a pass is not finite."""


def checked_loss(loss: Array, is_tensor: Callable[[Array], bool]) -> Array:
    """Returns what a loss function returned, after checking that it is a loss."""
    wanted = "`loss_fn` must return the loss, a floating-point tensor with one element."
    if not is_tensor(loss):
        raise ArgumentTypeError(
            f"{wanted} Received: a {type(loss).__name__}. Return the loss alone, such as "
            "`output.loss`; diagnose several losses one by one, each with its `parameters`."
        )
    if known_size(loss) not in (1, None) or "float" not in str(loss.dtype):
        raise ArgumentError(
            f"{wanted} Received: a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}. "
            "Take the mean or the sum."
        )
    return loss


def known_size(tensor: Array) -> int | None:
    """The number of elements; None if a graph of TensorFlow knows it only when it runs."""
    try:
        return int(math.prod(tensor.shape))
    # A dimension is None, or the rank.
    except (TypeError, ValueError):
        return None


def explained_in_float16(explain: Callable[[bool], Explanation]) -> Explanation:
    """Returns the explanation of a pass in float16, or why there is none if only float16 raises.

    Args:
        explain: Explains a pass in float16 if called with True, otherwise in float32.
    """
    try:
        return explain(True)
    except LossScaleError:
        raise
    # Frameworks and models raise many kinds of exceptions if float16 is not what they expect.
    except Exception as error:
        # Otherwise the program is wrong, and its author should see it.
        explain(False)
        line = f"{type(error).__name__}: {first_line(error, 200)}"
        return not_explained(f"{_NOT_IN_FLOAT16}: {line}")


_Key = tuple[str, int]


class _Passes(NamedTuple):
    """A pass on each batch; `gradients` has those that are not None."""

    losses: NDArray[np.float64]
    gradients: Mapping[_Key, NDArray[np.float64]]
    targets_fit: bool


@dataclasses.dataclass(frozen=True)
class GradientAccuracy:
    """The accuracy of the gradient of one variable in float16, by loss scale.

    Attributes:
        name: The name of the variable.
        largest: The largest magnitude in the unscaled float32 gradient.
        errors: Exponent of each tried loss scale to the relative error there, the worst of all
            batches; infinite if the gradient overflows. Empty if it is 0 in float32.
    """

    name: str
    largest: float
    errors: Mapping[int, float]

    @property
    def is_wrong(self) -> bool:
        """Whether float16 is inaccurate at every scale, so that no scale can be judged by it."""
        return min(self.errors.values(), default=math.inf) >= NOISE

    @property
    def is_wide(self) -> bool:
        """Whether it is in float32, also in the pass in float16."""
        return _is_wide(self.largest, self.errors)

    def excess_error(self, exponent: int) -> float:
        """Returns the error at a scale that was tried beyond that at its best scale."""
        return _beyond(self.errors[exponent], min(self.errors.values()))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The effect of float16 on the gradients of a loss.

    Attributes:
        gradients: The accuracy of each gradient, in the order of the variables.
        lowest_exponent: That of the lowest scale at which every gradient is right; 0 for 0 or less.
        highest_exponent: That of the highest scale at which every gradient is finite.
        overflows_at: The part that is not finite in float16 at any scale: "the targets", "the
            loss", "the forward pass" or "the gradient of ..."; "" if none.
        explanation: Why it is not, if the operation was found.
        reference: The exponent of the loss scale at which the float32 gradients were computed: 0,
            or higher for a model that casts to float16 itself.
        batches: The number of batches.
        passes: The number of forward and backward passes.
        unknown: The reason why there is no verdict; "" if there is one.
    """

    gradients: tuple[GradientAccuracy, ...] = ()
    lowest_exponent: int = 0
    highest_exponent: int = _HIGHEST
    overflows_at: str = ""
    explanation: Explanation | None = None
    reference: int = 0
    batches: int = 0
    passes: int = 0
    unknown: str = ""

    @property
    def ranked(self) -> list[GradientAccuracy]:
        """The gradients by which a scale can be judged, the worst at scale 1 first.

        A gradient that overflows at scale 1 has no error there to rank.
        """
        found = [
            g for g in self.gradients if not g.is_wrong and g.errors.get(0, math.inf) < math.inf
        ]
        return sorted(found, key=lambda each: -each.excess_error(0))

    @property
    def inaccurate(self) -> dict[str, float]:
        """The errors at the best scale that are above the tolerance, by gradient."""
        judged = [each for each in self.gradients if not each.is_wrong]
        best = {each.name: min(each.errors.values()) for each in judged}
        return {name: error for name, error in best.items() if error > TOLERANCE}

    @property
    def worst_error(self) -> float:
        """The largest error of a finite gradient without scaling, beyond that at its best scale."""
        return max((each.excess_error(0) for each in self.ranked), default=0.0)


def measure(
    run: GradientFunction[Batch], batches: Iterable[Batch], max_batches: int = 2
) -> Measurement:
    """Measures a loss; the worst of all batches counts.

    Args:
        run: Computes a pass.
        batches: The batches to measure on.
        max_batches: The largest number of batches.

    Raises:
        ArgumentTypeError: If `batches` is a batch, or not an iterable.
        ArgumentError: If it is empty, or another argument is out of range.
    """
    parts = batches if isinstance(batches, tuple) else [batches]
    is_batch = isinstance(batches, Mapping) or any(hasattr(part, "shape") for part in parts)
    if is_batch or not hasattr(batches, "__iter__"):
        raise ArgumentTypeError(
            "`batches` must be an iterable of batches, such as a list or a DataLoader; one batch "
            f"is [batch]. Received: a {type(batches).__name__}."
        )
    taken = list(itertools.islice(batches, checked_count("max_batches", max_batches)))
    if not taken:
        raise ArgumentError(
            "`batches` must contain at least one batch. Received: an empty "
            f"{type(batches).__name__}."
        )
    return _Batches(run, taken).measured()


class _Batches(Generic[Batch]):
    """The passes on all batches, and the errors of their gradients at the scales that were tried.

    A gradient is known by its name and the number of the batch.
    """

    def __init__(self, run: GradientFunction[Batch], batches: Sequence[Batch]) -> None:
        self._run, self._batches = run, batches
        self._errors: dict[int, dict[_Key, float]] = {}
        self._passes = self._reference_exponent = 0

    def measured(self) -> Measurement:
        """Measures the forward pass, then the lowest and the highest scale."""
        self._reference = wide = self._pass(0, half=False)
        if not wide.gradients:
            raise ArgumentError(
                "The loss depends on no trainable parameter. Compute it from the model or the "
                "parameters that `loss_fn` receives, without detaching it."
            )
        if not _is_finite(wide):
            why = self._explained(half=False)
            if why is not None and why.in_float16:
                return self._found(overflows_at="the loss", explanation=why)
            unknown = "the loss or a gradient is not finite in float32 already"
            unknown += "" if why is None else f": {why.reason}"
            return self._found(unknown=unknown, explanation=why)
        try:
            narrow = self._pass(0, half=True)
        except LossScaleError:
            raise
        # The model has run in float32, so the cause is float16; frameworks and models raise many
        # kinds of exceptions for that.
        except Exception as error:
            return self._found(unknown=f"{_NOT_IN_FLOAT16}: {first_line(error, 200)}")
        if not narrow.targets_fit:
            return self._found(overflows_at=TARGETS)
        if not np.isfinite(narrow.losses).all():
            return self._found(overflows_at="the loss", explanation=self._explained())
        self._errors[0] = _errors(wide, narrow)
        found = self._backward()
        least = _ROUNDING * self._largest()
        measured = [g for g in found.gradients if g.errors and g.largest > least]
        wrong = [g.name for g in measured if g.is_wrong]
        is_right = all(min(g.errors.values()) <= TOLERANCE for g in measured)
        if is_right or found.unknown:
            return found
        # An overflow that a later operation hides does no harm unless gradients are wrong. If it is
        # in a few rows, they are not all noise.
        why = self._explained(exponent=min(found.highest_exponent, 0), hidden=True)
        if why is not None and why.cause is not Cause.UNKNOWN:
            return dataclasses.replace(found, overflows_at="the forward pass", explanation=why)
        if why is not None:
            unknown = f"float16 makes a gradient inaccurate at every scale: {why.reason}"
        elif wrong:
            unknown = f"the gradient of {wrong[0]} is wrong at every scale: it is rounded away, or "
            unknown += _RANDOM
        else:
            return found
        advice = "compute that part of the model in float32, or draw the same random numbers"
        why = Explanation(Cause.UNKNOWN, unknown, advice)
        return dataclasses.replace(found, unknown=unknown, explanation=why)

    def _backward(self) -> Measurement:
        predicted = self._predicted()
        second = predicted if predicted < 0 else min(max(predicted, MARGIN), _SECOND)
        self._at(second)
        if unknown := self._correct_reference():
            return self._found(unknown=unknown)
        if not self._largest():
            return self._found(unknown="every gradient is 0")
        predicted = self._predicted()
        self._try_higher(NOISE)
        is_right = self._worst(0) <= TOLERANCE
        if is_right and second >= MARGIN and self._is_finite(second):
            return self._found(highest_exponent=max(predicted, second))
        highest = self._highest_finite(predicted)
        best = self._best()
        overflowing = [n for n, e in self._at(min(predicted, 0)).items() if math.isinf(e)]
        # They are not too large: they are finite at no scale, or only where they are 0.
        if broken := [key for key in overflowing if best[key] >= NOISE]:
            where = f"the gradient of {broken[-1][0]}"
            return self._found(overflows_at=where, explanation=self._explained())
        self._try_higher(NOISE if is_right else TOLERANCE)
        lowest = 0 if self._worst(0) <= TOLERANCE else self._find_lowest()
        return self._found(lowest_exponent=lowest, highest_exponent=highest)

    def _predicted(self) -> int:
        """The highest exponent at which the gradients that are in float16 are finite."""
        sizes = (
            size
            for key, gradient in self._reference.gradients.items()
            for size in [_size(gradient)]
            if not _is_wide(size, {e: each.get(key, math.inf) for e, each in self._errors.items()})
        )
        return _predicted_highest(max(sizes, default=0.0))

    def _largest(self) -> float:
        """The largest magnitude in all gradients of the reference."""
        return max(map(_size, self._reference.gradients.values()))

    def _explained(
        self, *, half: bool = True, exponent: int = 0, hidden: bool = False
    ) -> Explanation | None:
        """Explains why no loss scale makes a pass finite; None if that is not found out."""
        for batch in self._batches:
            # Frameworks and models raise many kinds of exceptions; the verdict holds without it.
            with contextlib.suppress(Exception), kept_random_states():
                found = self._run.explain(batch, 2.0**exponent, half)
                # A compiled pass may compute more, or less, in float16 than operation by operation.
                is_known = found.cause is not Cause.UNKNOWN or (hidden and found.operation)
                if is_known and found.cause is not Cause.SCALE:
                    return found
        return None

    def _found(self, **fields: Any) -> Measurement:
        largest: dict[str, float] = {}
        for (name, _), gradient in self._reference.gradients.items():
            largest[name] = max(_size(gradient), largest.get(name, 0.0))
        errors: dict[str, dict[int, float]] = {name: {} for name in largest}
        for exponent, each in sorted(self._errors.items()):
            for (name, _), error in each.items():
                errors[name][exponent] = max(error, errors[name].get(exponent, 0.0))
        return Measurement(
            tuple(GradientAccuracy(name, largest[name], errors[name]) for name in largest),
            reference=self._reference_exponent,
            batches=len(self._batches),
            passes=self._passes,
            **fields,
        )

    def _pass(self, exponent: float, *, half: bool) -> _Passes:
        """Computes a pass on each batch; divides the gradients by the loss scale."""
        scale = 2.0**exponent
        found = []
        for batch in self._batches:
            self._passes += 1
            # Overflow is measured here, so silence warnings of it.
            with kept_random_states(), np.errstate(all="ignore"):
                found.append(self._run(batch, scale, half))
        gradients = {
            (name, number): np.asarray(gradient, np.float64) / scale
            for number, each in enumerate(found)
            for name, gradient in each.gradients.items()
            if gradient is not None
        }
        losses = np.array([each.loss for each in found])
        return _Passes(losses, gradients, all(each.targets_fit for each in found))

    def _at(self, exponent: int) -> dict[_Key, float]:
        """The error of each gradient at a scale, which is tried if it was not."""
        if exponent not in self._errors:
            self._errors[exponent] = _errors(self._reference, self._pass(exponent, half=True))
        return self._errors[exponent]

    def _correct_reference(self) -> str:
        """Takes the reference at a higher loss scale if it depends on the scale.

        A model that casts to float16 itself casts in the reference too. Small gradients become 0
        there, or wrong by much.

        Returns:
            The reason why there is no reference, "" if there is one.
        """
        wide = self._reference
        is_doubtful = any(not np.any(g) for g in wide.gradients.values()) or any(
            TOLERANCE < e < math.inf for each in self._errors.values() for e in each.values()
        )
        if not is_doubtful:
            return ""
        exponent = max(_predicted_highest(self._largest()) - MARGIN, _SECOND)
        raised = self._pass(exponent, half=False)
        if (abs(raised.losses - wide.losses) > _SAME * abs(wide.losses)).any():
            return _RANDOM
        if _is_finite(raised):
            # Rounding that differs between equal passes, as in sums on a GPU, is not a cast.
            again = self._pass(exponent, half=False)
            changed = _differing(raised, wide) - _differing(raised, again)
            if not changed:
                return ""
            # If a scale is accurate, the scale two bits lower is nearly so.
            lower = _errors(raised, self._pass(exponent - 2, half=False))
            if all(lower[name] <= TOLERANCE for name in changed):
                self._reference, self._reference_exponent = raised, exponent
                tried, self._errors = self._errors, {}
                for each in tried:
                    self._at(each)
                return ""
        return (
            "the model casts to float16 itself, and its float32 gradients change with the loss "
            f"scale up to 2**{exponent}"
        )

    def _try_higher(self, error_from: float) -> None:
        """Tries higher scales while a gradient with such an error may have its best scale there."""
        while True:
            gradients = self._reference.gradients
            waiting = [
                _predicted_highest(_size(gradients[name])) - 1
                for name, error in self._best().items()
                if error >= error_from
            ]
            higher = [each for each in waiting if each > max(self._errors)]
            if not higher:
                return
            self._at(min(higher))

    def _highest_finite(self, start: int) -> int:
        """The highest exponent at which gradients are finite, downward from that of float32."""
        if self._is_finite(start):
            return start
        step = 1
        # Grow the step: gradients inside of the model may be far larger.
        while start - step > -_HIGHEST and not self._is_finite(start - step):
            step *= 2
        low, high = max(start - step, -_HIGHEST), start - step // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_finite(middle) else (low, middle)
        return low

    def _find_lowest(self) -> int:
        """The lowest exponent at which no gradient is wrong by more than the tolerance."""
        while True:
            tried = [each for each in self._errors if each >= 0]
            low = max(each for each in tried if self._worst(each) > TOLERANCE)
            high = min((each for each in tried if each > low), default=_HIGHEST)
            if high - low <= 1:
                return high
            self._at((low + high) // 2)

    def _is_finite(self, exponent: int) -> bool:
        return all(map(math.isfinite, self._at(exponent).values()))

    def _best(self) -> dict[_Key, float]:
        """The smallest error of each gradient at any scale that was tried."""
        found: dict[_Key, float] = {}
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


def _errors(reference: _Passes, found: _Passes) -> dict[_Key, float]:
    """The error of each gradient that is not 0 in float32; infinite for one that overflows."""
    errors = {}
    for name, gradient in reference.gradients.items():
        narrow = found.gradients.get(name)
        if narrow is None:
            continue
        norm, difference = np.linalg.norm(gradient), np.linalg.norm(narrow - gradient)
        if not math.isfinite(difference):
            errors[name] = math.inf
        elif norm:
            errors[name] = float(difference / norm)
    return errors


def _is_wide(size: float, errors: Mapping[int, float]) -> bool:
    """Whether a gradient of a size is finite where float16 cannot hold it."""
    return any(size * 2.0**e > 2 * LARGEST and math.isfinite(each) for e, each in errors.items())


def _differing(one: _Passes, other: _Passes) -> set[_Key]:
    return {name for name, error in _errors(one, other).items() if error > _SAME}


def _beyond(error: float, best: float) -> float:
    return math.inf if math.isinf(error) else math.sqrt(max(error**2 - best**2, 0.0))


def _is_finite(found: _Passes) -> bool:
    return all(np.isfinite(each).all() for each in (found.losses, *found.gradients.values()))


def _size(gradient: NDArray[np.float64]) -> float:
    """The largest magnitude in a gradient."""
    return float(np.abs(gradient).max(initial=0))


def _predicted_highest(largest: float) -> int:
    """The highest scale at which a gradient of that size fits into float16, by its exponent."""
    if not largest:
        return _FAR
    return max(min(math.floor(math.log2(LARGEST / largest)), _HIGHEST), -_HIGHEST)

"""Whether gradients need loss scaling: the verdict on one histogram."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple

from lossscale.checks import SMALLEST_SCALE, checked_count, checked_number
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.powers import power_of_two
from lossscale.errors import ArgumentError


class Verdict(enum.StrEnum):
    """What to do about loss scaling, from the least to the most."""

    UNKNOWN = "unknown"
    """The gradients do not tell."""

    NOT_NEEDED = "not needed"
    """Next to nothing is lost without it."""

    RECOMMENDED = "recommended"
    """Something is lost without it."""

    REQUIRED = "required"
    """So much is lost without it that training suffers."""

    INSUFFICIENT = "global scale insufficient"
    """No single scale keeps the small gradients and lets the large ones fit."""

    @property
    def severity(self) -> int:
        """Its place in this list, from 0."""
        return list(Verdict).index(self)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Where the verdicts begin.

    Those of what is measured in float16 were found with small trainings of six kinds
    (`make calibration`), those of the prediction on the gradient of the logits of one small
    language model, of which shares from 1 % to 25 % were made to become zero. So take them for a
    guide.

    Args:
        flushed_mass: The share of the sum of |x| that may become zero and still be next to
            nothing, above 0.
        required_flushed_mass: The share from which loss scaling is required.
        margin: The room to leave between the largest gradient and overflow, in bits: later
            gradients may be larger than those that were measured.
        summands: How many gradients are added up in the format before they are unscaled:
            micro-batches times replicas. Each doubling takes a bit of room.
        negligible: A variable whose largest gradient is below this share of the largest gradient
            of its layer has no say in the verdict on the model. The gradient of a bias in front of
            a batch normalization, for instance, is zero but for rounding errors.
        lost: The share of a gradient's sum of |x| that is lost without scaling and not at a good
            scale, as measured in float16, from which loss scaling is recommended.
        required_lost: The share from which it is required: little of that gradient is left.
        error: How much larger the relative error of a gradient is without scaling than at a good
            scale, from which loss scaling is recommended. It also has to be larger than the error
            that remains.
        required_error: How much larger the relative error of all gradients together is, from which
            it is required.
        insufficient_lost: The share that a gradient still loses at the highest scale, from which no
            single scale is enough.
        insufficient_error: The same for its relative error.
        noise: A gradient with this relative error at every scale is rounding noise.

    Example:
        >>> Thresholds(margin=3.0).flushed_mass
        0.001
    """

    flushed_mass: float = 1e-3
    required_flushed_mass: float = 0.05
    margin: float = 2.0
    summands: int = 1
    negligible: float = 2.0**-16
    lost: float = 1e-3
    required_lost: float = 0.5
    error: float = 0.02
    required_error: float = 0.45
    insufficient_lost: float = 0.05
    insufficient_error: float = 0.2
    noise: float = 0.5

    def __post_init__(self) -> None:
        least = checked_number("flushed_mass", self.flushed_mass)
        most = checked_number("required_flushed_mass", self.required_flushed_mass)
        if not 0 < least <= most < 1:
            raise ArgumentError(
                "The shares must satisfy 0 < flushed_mass <= required_flushed_mass < 1. Received: "
                f"flushed_mass={least}, required_flushed_mass={most}."
            )
        if not 0 <= checked_number("margin", self.margin) < math.inf:
            raise ArgumentError(
                "`margin` must be a finite number of bits from 0 up. "
                f"Received: margin={self.margin!r}."
            )
        checked_count("summands", self.summands)
        if not 0 <= checked_number("negligible", self.negligible) < 1:
            raise ArgumentError(
                "`negligible` must be a share from 0 to below 1. "
                f"Received: negligible={self.negligible!r}."
            )
        for name in ("lost", "error"):
            low = checked_number(name, getattr(self, name))
            high = checked_number(f"required_{name}", getattr(self, f"required_{name}"))
            if not 0 < low <= high < 1:
                raise ArgumentError(
                    f"They must satisfy 0 < {name} <= required_{name} < 1. Received: "
                    f"{name}={low}, required_{name}={high}."
                )
        for name in ("insufficient_lost", "insufficient_error"):
            if not 0 < checked_number(name, getattr(self, name)) < 1:
                raise ArgumentError(
                    f"`{name}` must be above 0 and below 1. Received: "
                    f"{name}={getattr(self, name)!r}."
                )
        if not 0 < checked_number("noise", self.noise) <= 1:
            raise ArgumentError(
                f"`noise` must be above 0 and at most 1. Received: noise={self.noise!r}."
            )

    @property
    def room(self) -> float:
        """The headroom to leave, in bits."""
        return self.margin + math.log2(self.summands)

    def scales(
        self, histogram: GradientHistogram, format: str | NumberFormat
    ) -> tuple[float, float]:
        """Returns the smallest and the largest scale that suit a gradient, as powers of two.

        If the first is above the second, none does. They are 0 and infinity if nothing is to be
        scaled, because no finite element is above zero.

        Args:
            histogram: The gradient without scaling.
            format: The format that it is to fit, a key of `FORMATS`.
        """
        lowest = histogram.min_scale(format, max_flushed_mass=self.flushed_mass)
        highest = histogram.max_scale(format, margin=self.margin, summands=self.summands)
        if lowest is None or highest is None:
            return 0.0, math.inf
        return max(lowest, SMALLEST_SCALE), highest


class Judgement(NamedTuple):
    """The verdict on a gradient.

    Attributes:
        verdict: The verdict.
        reason: Why, in a sentence.
    """

    verdict: Verdict
    reason: str


def judge(
    histogram: GradientHistogram,
    format: str | NumberFormat = "float16",
    thresholds: Thresholds | None = None,
) -> Judgement:
    """Judges whether a gradient needs loss scaling in a number format.

    Args:
        histogram: The gradient as it is without scaling, measured in a format that did not flush
            it, such as float32. In float16 without scaling, what was lost cannot be seen.
        format: The format that gradients will be computed in, a key of `FORMATS`.
        thresholds: Where the verdicts begin; None for the defaults.

    Returns:
        The verdict and its reason.

    Raises:
        ArgumentError: If the format is not known. It is a `ValueError`.

    Example:
        >>> judge(GradientHistogram.from_array([1e-3, 1e-2])).verdict.value
        'not needed'
        >>> print(judge(GradientHistogram.from_array([1e-9, 1e-8, 1e-7])).reason)
        9.91 % of the sum of |x| is too small for float16 and becomes zero.
    """
    limits = thresholds or Thresholds()
    known = number_format(format)
    if histogram.infs or histogram.nans:
        bad = histogram.infs + histogram.nans
        return Judgement(
            Verdict.UNKNOWN,
            f"{bad:,} of {histogram.size:,} elements are infinite or NaN before any scaling: a "
            "fault of the model or of its data, which no loss scale mends.",
        )
    if not histogram.bins:
        zero = "Every element is zero." if histogram.size else "The loss does not depend on it."
        return Judgement(Verdict.UNKNOWN, zero)
    lost = histogram.flushed_mass(known)
    headroom = histogram.headroom_bits(known)
    if lost <= limits.flushed_mass and headroom >= limits.room:
        return Judgement(
            Verdict.NOT_NEEDED,
            f"{share(lost)} of the sum of |x| is too small for {known.name}, and the largest "
            f"element can double {math.floor(headroom)} times.",
        )
    lowest, highest = limits.scales(histogram, known)
    if lowest > highest:
        left = histogram.flushed_mass(known, highest)
        return Judgement(
            Verdict.INSUFFICIENT,
            f"It is too wide for {known.name}: at {power_of_two(highest)}, the largest scale "
            f"without overflow, {share(left)} of the sum of |x| still becomes zero.",
        )
    if lost > limits.flushed_mass:
        verdict = Verdict.REQUIRED if lost >= limits.required_flushed_mass else Verdict.RECOMMENDED
        return Judgement(
            verdict,
            f"{share(lost)} of the sum of |x| is too small for {known.name} and becomes zero.",
        )
    overflows = histogram.overflow_count(known)
    if overflows:
        return Judgement(
            Verdict.REQUIRED,
            f"The largest element is too large for {known.name}: a loss scale below 1 is needed.",
        )
    return Judgement(
        Verdict.RECOMMENDED,
        f"The largest element is {headroom:.1f} bits below overflow in {known.name}: a loss scale "
        "below 1 leaves more room.",
    )


def share(value: float) -> str:
    """Writes a share from 0 to 1 as a percentage with three digits.

    Example:
        >>> share(0.0), share(0.5), share(0.01234), share(3e-7), share(0.9999), share(1)
        ('0 %', '50.0 %', '1.23 %', 'under 0.001 %', 'over 99.9 %', '100 %')
    """
    percent = 100 * value
    if percent in (0, 100):
        return f"{percent:.0f} %"
    if percent < 0.001:
        return "under 0.001 %"
    if percent > 99.9:
        return "over 99.9 %"
    digits = max(0, 2 - math.floor(math.log10(percent)))
    return f"{percent:.{min(digits, 3)}f} %"

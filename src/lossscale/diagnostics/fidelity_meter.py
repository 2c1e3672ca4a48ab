"""Measures fidelity batch by batch: what a framework has to give, and the search for scales.

A framework gives one function, `Gradients`. On the first batch the scales are searched for: the
highest power of two at which every gradient is finite, and the lowest that mends what scaling can
mend. On each other batch gradients are computed once for the reference, and once at each scale that
is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lossscale.diagnostics.deviation import Deviation, deviation
from lossscale.diagnostics.fidelity import BELOW, Fidelity, VariableFidelity
from lossscale.diagnostics.format_fit import middle_scale
from lossscale.diagnostics.verdict import Thresholds

_LOWEST_POWER, _HIGHEST_POWER = -24, 48
_FIRST_POWER = 15
"""Where the search begins if no prediction says better: at the first scale of a dynamic rule."""

_SAME = 1e-3
"""Up to this relative error two references are the same but for the order of sums."""

_FAR = 10
"""So far below a highest scale below 1 the lowest one is looked for, in powers of two."""

_CHANCE = (
    "Two runs of the model on the same batch gave different gradients, so float16 cannot be told "
    "from chance. It draws random numbers of its own: let its layers draw them from Keras, with a "
    "seed generator, or ask without them."
)

MOST_RUNS_OF_SEARCH = 32
"""How many times gradients are computed on the first batch, at most."""

RUNS_OF_A_BATCH = 4
"""How many times on each other batch, at most, unless one overflows."""


class Gradients(Protocol):
    """What a framework provides.

    It must leave the model as it was. Called twice with the same arguments it must give the same:
    dropout must draw the same numbers, whatever the scale and the precision.
    """

    def __call__(self, batch: Any, scale: float, *, reference: bool) -> Mapping[str, Any]:
        """Returns the gradients of the loss on a batch, times a scale.

        Args:
            batch: As the caller of `FidelityMeter.add` gives it.
            scale: What the loss is multiplied by before gradients are taken, a power of two.
            reference: Whether to compute everything in float32 (or wider); otherwise as training
                in float16 does.

        Returns:
            The name of each trainable variable to its gradient, still scaled, on the host: an
            array in the dtype in which it is formed. A sparse gradient is summed over rows that
            recur, as a training step does, and may leave out the rows that are not in it. None if
            the loss does not depend on the variable.
        """


class FidelityMeter:
    """Compares gradients in float16 with their reference, on one batch after another.

    In memory are three copies of the gradients of a model at most, on the host. On the first batch
    gradients are computed at most `MOST_RUNS_OF_SEARCH` times, on each other at most
    `RUNS_OF_A_BATCH` times.

    Args:
        gradients: What the framework provides.
        layers: The name of each variable to that of its layer, in the order of the model.
        in_use: The loss scale of the model's optimizer, which is measured as well, or None.
        thresholds: What scaling has to mend; None for the defaults.

    Example:
        >>> import numpy as np
        >>> def gradients(batch, scale, *, reference):
        ...     exact = np.float32(batch * scale)
        ...     with np.errstate(over="ignore"):
        ...         return {"w": exact if reference else exact.astype(np.float16)}
        >>> meter = FidelityMeter(gradients, {"w": "layer"})
        >>> meter.add(np.array([1e-8, 1e-4]))
        >>> found = meter.result()
        >>> found.judge().verdict.value, found.highest
        ('not needed', 536870912.0)
    """

    def __init__(
        self,
        gradients: Gradients,
        layers: Mapping[str, str],
        *,
        in_use: float | None = None,
        thresholds: Thresholds | None = None,
    ) -> None:
        self._gradients, self._layers = gradients, dict(layers)
        self._in_use, self._limits = in_use, thresholds or Thresholds()
        self._found: dict[float, dict[str, Deviation]] = {}
        self._good: float | None = None
        self._lowest: float | None = None
        self._highest: float | None = None
        self._too_large: tuple[str, ...] = ()
        self._reference_scale = 1.0
        self._batches = self._runs = 0
        self._missing = ""

    def add(self, batch: Any, predicted: float | None = None) -> None:
        """Measures one more batch.

        Args:
            batch: What the framework's function takes.
            predicted: Of the first batch, about the highest scale without overflow, to begin the
                search with; None if nothing is known.
        """
        if self._missing:
            return
        self._batches += 1
        if self._batches == 1:
            self._search(batch, predicted)
            return
        at = self._new_probe(batch, self._run(batch, self._reference_scale, True))
        for scale in self._scales:
            self._keep(scale, at(scale))
        while self._good is not None and _not_finite(at(self._good)):
            # A batch that is larger than the first one brings the scale down.
            self._highest = self._good / 2
            lowest = min(self._lowest or 1.0, self._highest)
            self._lowest, self._good = lowest, self._between(lowest, self._highest)
            if math.log2(self._highest) < _LOWEST_POWER:
                self._good = self._highest = None
                return
            if self._good not in self._found:
                self._keep(self._good, at(self._good))

    def give_up(self, reason: str) -> None:
        """Ends it without a result.

        Args:
            reason: Why nothing can be measured, as a sentence.
        """
        self._missing = reason

    def result(self) -> Fidelity:
        """Returns what was found on all batches."""
        if not self._batches and not self._missing:
            self._missing = "There was no batch."
        variables = tuple(
            VariableFidelity(
                name, layer, {scale: by_name[name] for scale, by_name in self._found.items()}
            )
            for name, layer in self._layers.items()
        )
        return Fidelity(
            variables=() if self._missing else variables,
            good=self._good,
            lowest=self._lowest,
            highest=self._highest,
            in_use=self._in_use,
            too_large=self._too_large,
            reference_scale=self._reference_scale,
            batches=self._batches,
            runs=self._runs,
            missing=self._missing,
        )

    @property
    def _scales(self) -> list[float]:
        scales = (1.0, self._good, self._in_use)
        return list(dict.fromkeys(scale for scale in scales if scale is not None))

    def _keep(self, scale: float, found: Mapping[str, Deviation]) -> None:
        before = self._found.get(scale)
        self._found[scale] = {
            name: found[name] if before is None else Deviation.total([before[name], found[name]])
            for name in self._layers
        }

    def _run(self, batch: Any, scale: float, reference: bool) -> Mapping[str, Any]:
        self._runs += 1
        return self._gradients(batch, scale, reference=reference)

    def _new_probe(
        self, batch: Any, reference: Mapping[str, Any]
    ) -> Callable[[float], dict[str, Deviation]]:
        """Returns what compares the gradients of a batch at a scale with the reference."""
        known: dict[float, dict[str, Deviation]] = {}

        def at(scale: float) -> dict[str, Deviation]:
            if scale not in known:
                found = self._run(batch, scale, False)
                known[scale] = self._compared(reference, found, scale, self._reference_scale)
            return known[scale]

        return at

    def _compared(
        self, reference: Mapping[str, Any], found: Mapping[str, Any], scale: float, other: float
    ) -> dict[str, Deviation]:
        return {
            name: deviation(
                reference.get(name), found.get(name), scale=scale, reference_scale=other
            )
            for name in self._layers
        }

    # --- The first batch ----------------------------------------------------------------------

    def _search(self, batch: Any, predicted: float | None) -> None:
        first = self._run(batch, 1.0, True)
        at = self._new_probe(batch, first)
        power = _FIRST_POWER if predicted is None else _power(predicted)
        highest = _highest(lambda power: not _not_finite(at(2.0**power)), power)
        if highest is not None:
            scaled = self._run(batch, 2.0**highest, True)
            if self._differ(scaled, first, 2.0**highest):
                if self._differ(self._run(batch, 1.0, True), first, 1.0):
                    self._missing = _CHANCE
                    return
                # Its own casts lose in float32 what they lose in float16, but not at a high scale.
                self._reference_scale = 2.0**highest
                at = self._new_probe(batch, scaled)
        self._keep(1.0, at(1.0))
        if highest is not None:
            self._highest = 2.0**highest
            self._choose(at, highest)
        if self._in_use is not None and self._in_use not in self._found:
            self._keep(self._in_use, at(self._in_use))

    def _choose(self, at: Callable[[float], dict[str, Deviation]], highest: int) -> None:
        top = at(2.0**highest)
        if highest < _HIGHEST_POWER:
            self._too_large = tuple(
                name for name, found in at(2.0 ** (highest + 1)).items() if found.nonfinite
            )

        def mended(power: int) -> bool:
            return all(
                _as_good(found, top[name], self._limits) for name, found in at(2.0**power).items()
            )

        lowest = 0 if highest >= 0 else max(highest - _FAR, _LOWEST_POWER)
        if not mended(lowest):
            below, lowest = lowest, highest
            while lowest - below > 1:
                middle = (below + lowest) // 2
                below, lowest = (below, middle) if mended(middle) else (middle, lowest)
        self._lowest = 2.0**lowest
        self._good = self._between(self._lowest, 2.0**highest)
        for scale in (self._good, 2.0**highest):
            if scale not in self._found:
                self._keep(scale, at(scale))
        if any(not _as_good(found, Deviation(), self._limits) for found in top.values()):
            below_top = 2.0**highest / BELOW
            if below_top not in self._found:
                self._keep(below_top, at(below_top))

    def _between(self, lowest: float, highest: float) -> float:
        """The middle of the scales that serve, with room for gradients that grow."""
        room = 2.0 ** math.ceil(self._limits.room)
        return middle_scale(lowest, max(lowest, highest / room)) or lowest

    def _differ(self, found: Mapping[str, Any], first: Mapping[str, Any], scale: float) -> bool:
        """Whether a reference changes with the loss scale, which float32 does not."""
        both = self._compared(found, first, 1.0, scale).values()
        return any(
            each.nonfinite or (each.error > _SAME and not each.reference_nonfinite) for each in both
        )


def fidelity_at(
    gradients: Gradients, batch: Any, scale: float, layers: Mapping[str, str]
) -> dict[str, Deviation]:
    """Compares the gradients of one batch at one scale with their reference: two runs.

    Args:
        gradients: What the framework provides.
        batch: What its function takes.
        scale: The loss scale.
        layers: The names of the variables, as keys.

    Returns:
        The name of each variable to what was found.
    """
    reference = gradients(batch, 1.0, reference=True)
    found = gradients(batch, scale, reference=False)
    return {name: deviation(reference.get(name), found.get(name), scale=scale) for name in layers}


def _not_finite(found: Mapping[str, Deviation]) -> bool:
    return any(each.nonfinite for each in found.values())


def _as_good(found: Deviation, top: Deviation, limits: Thresholds) -> bool:
    """Whether a scale serves a variable as well as the highest one, or nearly."""
    lost, error = found.lost - top.lost, found.error - top.error
    return (
        not found.nonfinite
        and lost <= limits.lost
        and error <= max(limits.error, min(found.error, top.error))
    )


def _power(scale: float) -> int:
    power = math.frexp(scale)[1] - 1 if 0 < scale < math.inf else _FIRST_POWER
    return min(max(power, _LOWEST_POWER), _HIGHEST_POWER)


def _highest(fits: Callable[[int], bool], start: int) -> int | None:
    """Returns the largest power at which something fits, that fits below it as well."""
    low, high, step = None, None, 1
    power = start
    while low is None or high is None:
        if fits(power):
            low = power
            if power == _HIGHEST_POWER:
                return power
            power = min(power + step, _HIGHEST_POWER) if high is None else power
        else:
            high = power
            if power == _LOWEST_POWER:
                return None
            power = max(power - step, _LOWEST_POWER) if low is None else power
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

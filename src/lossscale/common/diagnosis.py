"""What every diagnosis does: the runs of a batch, and what is made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lossscale.common.probing import said_by
from lossscale.diagnostics.fidelity import Fidelity
from lossscale.diagnostics.fidelity_meter import FidelityMeter
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.measurement import Counted, Derived, GivenBatch, Measurement, counted
from lossscale.diagnostics.tapping import TappedModel
from lossscale.diagnostics.verdict import Thresholds
from lossscale.errors import ArgumentError, ArgumentTypeError

Derive = Callable[[Any, float], list[Derived]]
"""Given a batch and a loss scale, returns the gradients of the scaled loss."""


def check_batches(batches: Any, arrays: tuple[type[Any], ...]) -> None:
    """Checks that there are several batches where one would look alike.

    Args:
        batches: What should be an iterable of batches.
        arrays: What a framework keeps a batch, or a part of one, in.

    Raises:
        ArgumentTypeError: If it is one batch, or nothing to iterate over.
    """
    one = isinstance(batches, (*arrays, Mapping)) or (
        isinstance(batches, tuple) and any(isinstance(part, arrays) for part in batches)
    )
    if one or not hasattr(batches, "__iter__"):
        shape = f" of shape {tuple(batches.shape)}" if isinstance(batches, arrays) else ""
        raise ArgumentTypeError(
            "`batches` must be an iterable of batches, such as a list or a DataLoader; one batch "
            f"is [batch]. Received: a {type(batches).__name__}{shape}."
        )


def looking_inside(derive: Derive, tapped_model: TappedModel | None) -> Derive:
    """Returns what derives by the tensors inside of layers too, as far as they can be got at.

    Args:
        derive: Derives by what is tapped.
        tapped_model: Where the model is tapped; None where it is not.
    """
    if tapped_model is None:
        return derive

    def derived(batch: Any, scale: float) -> list[Derived]:
        try:
            found = derive(batch, scale)
        except Exception:
            # A layer may be called in a loop or a branch, from which no tensor gets out.
            if not tapped_model.leave_inside():
                raise
            found = derive(batch, scale)
        return tapped_model.without_lost(found)

    return derived


class ModelGradients:
    """The gradients of a model in float32 and in float16, as `FidelityMeter` takes them.

    Args:
        reference: Computes them in float32, by variables and by tensors inside.
        narrow: Computes them in float16, by variables.
        names: The names of the variables.
        on_host: Returns a gradient as a NumPy array.
    """

    def __init__(
        self,
        reference: Derive,
        narrow: Derive,
        names: Sequence[str],
        on_host: Callable[[Any], Any],
    ) -> None:
        self._reference, self._narrow = reference, narrow
        self._names, self._on_host = names, on_host
        self._kept: Mapping[str, Any] | None = None

    def derived(self, batch: Any) -> list[Derived]:
        """Returns the reference, whose variables the next call gives out again."""
        found = self._reference(batch, 1.0)
        self._kept = self._by_name(found)
        return found

    def __call__(self, batch: Any, scale: float, *, reference: bool) -> Mapping[str, Any]:
        """Returns the gradients of the scaled loss, by the names of the variables."""
        kept, self._kept = self._kept, None
        if kept is not None and reference and scale == 1:
            return kept
        return self._by_name((self._reference if reference else self._narrow)(batch, scale))

    def _by_name(self, derived: Iterable[Derived]) -> dict[str, Any]:
        return {
            self._names[each.key]: None if each.gradient is None else self._on_host(each.gradient)
            for each in derived
            if isinstance(each.key, int)
        }


class OfUser(NamedTuple):
    """What a loss function of the user's is called with once.

    Attributes:
        data: The batch.
        samples: How many samples are in it.
    """

    data: Any
    samples: int


def first_batches(
    batches: Iterable[Any], most: int, samples_in: Callable[[Any], int | None]
) -> Iterator[OfUser]:
    """Yields the first batches.

    Args:
        batches: The batches.
        most: How many at most.
        samples_in: Returns how many samples are in a batch; None counts as one.

    Raises:
        ArgumentError: If there is none. It is a `ValueError`.
    """
    empty = True
    for data in itertools.islice(iter(batches), most):
        empty = False
        samples = samples_in(data)
        yield OfUser(data, 1 if samples is None else samples)
    if empty:
        raise ArgumentError(f"There is no batch in `batches`, of type {type(batches).__name__}.")


def checked_reference(reference: Any, known: Mapping[str, Any]) -> Any:
    """Returns the dtype in which a reference is computed.

    Args:
        reference: Its name, "float32" or "float64".
        known: The dtypes of a framework, by these names.

    Raises:
        ArgumentError: If it is no such name. It is a `ValueError`.
    """
    if reference not in known:
        raise ArgumentError(
            f"`reference` must be 'float32' or 'float64'. Received: reference={reference!r}."
        )
    return known[reference]


def measured(
    gradients: ModelGradients,
    batches: Iterable[GivenBatch],
    prepare: Callable[[Any], None],
    count: Callable[[Any], Any],
    paths: Sequence[tuple[str, str]],
    *,
    in_use: float | None,
    after_batch: Callable[[int], None],
    thresholds: Thresholds,
    quick: bool,
) -> tuple[Measurement, Fidelity | None]:
    """Measures batch by batch: what is in the gradients, and what float16 makes of them.

    Args:
        gradients: Those of the model.
        batches: What to measure on.
        prepare: Called with each batch before it is used; raises if it cannot be.
        count: Returns the table of exponents of a gradient, on the host.
        paths: The name of each variable, and that of its layer.
        in_use: The loss scale of the model's optimizer, or None.
        after_batch: Called after every batch with the number of batches so far.
        thresholds: Where the verdicts begin.
        quick: Whether to leave float16 out.
    """
    measurement = Measurement(after_batch)
    meter = FidelityMeter(gradients, dict(paths), in_use=in_use, thresholds=thresholds)
    for batch in batches:
        prepare(batch)
        found = counted(gradients.derived(tuple(batch)), count)
        if not quick:
            try:
                meter.add(tuple(batch), _predicted(found))
            # In float32 it has run, so that it is float16 that an operation does not take.
            except Exception as error:
                meter.give_up(
                    f"The model does not run in float16 here: {said_by(error.__cause__ or error)}"
                )
        measurement.add(batch, found)
    return measurement, None if quick else meter.result()


def _predicted(found: Iterable[Counted]) -> float | None:
    """The largest scale at which no gradient that was counted overflows."""
    histograms = [
        GradientHistogram.from_table(each.table) for each in found if each.table is not None
    ]
    scales = [histogram.max_scale("float16", margin=0) for histogram in histograms]
    highest = min((scale for scale in scales if scale is not None), default=math.inf)
    return highest if highest < math.inf else None

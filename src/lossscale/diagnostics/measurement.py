"""What was counted of gradients, and the ranges of tensors that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from lossscale.diagnostics.exponents import ZEROS, layout_of
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.tapping import OUTPUT
from lossscale.diagnostics.tensor_ranges import TensorKind, TensorRange

NARROW = ("float16", "bfloat16")
"""The dtypes in which gradients without scaling cannot show what they lost."""


class GivenBatch(Protocol):
    """A batch: iterated over, it gives what the gradients are computed from."""

    @property
    def samples(self) -> int:
        """How many samples it has."""

    def __iter__(self) -> Iterator[Any]: ...


class TappedNames(Protocol):
    """What is known of the tensors inside a model.

    Attributes:
        layer_names: The name of each tensor to that of its layer.
        untapped: The layers that what happens inside of is not known of.
    """

    layer_names: dict[str, str]
    untapped: tuple[str, ...]


class Derived(NamedTuple):
    """One gradient on one batch, where the framework computed it.

    Attributes:
        key: The number of the variable, or the name that a tensor was tapped with.
        dtype: The name of the dtype of what it is a gradient by.
        gradient: The gradient in the framework's array; None if the loss does not depend on it.
        left_out: How many zeros it lacks: the elements of rows that no sample has used.
    """

    key: int | str
    dtype: str
    gradient: Any
    left_out: Any


class Counted(NamedTuple):
    """The exponents of one gradient on one batch.

    Attributes:
        key: The number of the variable, or the name that a tensor was tapped with.
        dtype: The name of the dtype that the gradient came in.
        table: The table, on the host; None if the loss does not depend on the tensor.
    """

    key: int | str
    dtype: str
    table: Any


def counted(derived: Iterable[Derived], count: Callable[[Any], Any]) -> list[Counted]:
    """Returns what is counted of gradients.

    Args:
        derived: The gradients.
        count: Returns the table of exponents of a gradient, on the host.
    """
    found = []
    for key, dtype, gradient, left_out in derived:
        table = None if gradient is None else count(gradient)
        if table is not None and int(left_out):
            table.counts[layout_of(len(table.counts)).exponents + ZEROS, 0] += int(left_out)
        found.append(Counted(key, dtype, table))
    return found


class Measurement:
    """What is counted on one batch after another, and the report that it makes.

    Args:
        after_batch: Called after every batch with the number of batches so far.
    """

    def __init__(self, after_batch: Callable[[int], None]) -> None:
        self._after_batch = after_batch
        self._counted: list[Counted] = []
        self._batches = self._samples = 0

    def add(self, batch: GivenBatch, counted: Iterable[Counted]) -> None:
        """Adds what was counted on a batch."""
        self._counted += counted
        self._batches += 1
        self._samples += batch.samples
        self._after_batch(self._batches)

    def report(
        self,
        model: Any,
        framework: str,
        policies: Iterable[str],
        floatx: str,
        paths: Sequence[tuple[str, str]],
        tapped_model: TappedNames,
    ) -> GradientReport:
        """Returns the report.

        Args:
            model: The model that was measured.
            framework: What it runs on.
            policies: The names of the dtype policies of its layers that compute in 16 bits.
            floatx: The dtype of Keras in which it was measured.
            paths: The name of each variable, and that of its layer.
            tapped_model: Where the other tensors came from.
        """
        return GradientReport(
            model=model.name,
            framework=framework,
            policy=", ".join(sorted(policies)) or floatx,
            measured_in=floatx,
            batches=self._batches,
            samples=self._samples,
            ranges=ranges(self._counted, paths, tapped_model),
            blind=blind(self._counted, paths),
            untapped=tapped_model.untapped,
        )


def ranges(
    counted: Sequence[Counted], paths: Sequence[tuple[str, str]], tapped_model: TappedNames
) -> tuple[TensorRange, ...]:
    """Returns the range of each tensor over all batches.

    Args:
        counted: The gradients of all batches.
        paths: The name of each variable, and that of its layer.
        tapped_model: Where the other tensors came from.
    """
    histograms: dict[int | str, list[GradientHistogram]] = {}
    for key, _, table in counted:
        found = histograms.setdefault(key, [])
        if table is not None:
            found.append(GradientHistogram.from_table(table))
    merged = {key: GradientHistogram.merge(found) for key, found in histograms.items()}
    at_outputs = [merged[key] for key in merged if str(key).startswith(OUTPUT)]
    made = []
    for key, histogram in merged.items():
        if isinstance(key, int):
            made.append(TensorRange(*paths[key], TensorKind.VARIABLE, histogram))
        elif key.startswith(OUTPUT):
            made.append(
                TensorRange(key, tapped_model.layer_names[key], TensorKind.OUTPUT, histogram)
            )
        elif histogram not in at_outputs:
            # Else it is the same tensor, which a layer without variables passed on.
            made.append(
                TensorRange(key, tapped_model.layer_names[key], TensorKind.ACTIVATION, histogram)
            )
    return tuple(made)


def blind(counted: Sequence[Counted], paths: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the names of the tensors whose gradients came in a narrow format."""
    keys = dict.fromkeys(key for key, dtype, _ in counted if dtype in NARROW)
    return tuple(paths[key][0] if isinstance(key, int) else key for key in keys)


def paths_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the name of each variable and that of its layer; names that recur get a number."""
    seen: dict[str, int] = {}
    paths = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        number = f"#{seen[name]}" if seen[name] > 1 else ""
        paths.append((name + number, name.rpartition("/")[0] or name))
    return paths

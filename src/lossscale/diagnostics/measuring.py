"""Measures the gradients of a model, and says whether it needs loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale import registry
from lossscale.checks import checked_count, checked_truth
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.verdict import Thresholds
from lossscale.errors import ArgumentTypeError
from lossscale.packages import require


def diagnose(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batches: int = 4,
    batch_size: int = 32,
    format: str | NumberFormat = "float16",
    thresholds: Thresholds | None = None,
    quick: bool = False,
    after_batch: Callable[[int], None] = lambda number: None,
) -> GradientReport:
    """Measures the gradients of a compiled model on a few batches, and judges them.

    The gradients are those of the loss that the model was compiled with: by each trainable
    variable, by what each layer with variables returns, and by what the model returns. Of a model
    with a `train_step` of its own they are those that it gives to its optimizers. They are
    computed in float32 whatever the dtype policy of the model, because gradients in float16 cannot
    show what they lost; and in float16, at several loss scales, to see what becomes of them. The
    verdict rests on the comparison (`report.fidelity`). No step is taken. The model, its optimizer,
    its metrics, its statistics and its random seeds are left as they were, also by an exception.

    On the first batch gradients are computed 10 to 20 times (at most
    `fidelity_meter.MOST_RUNS_OF_SEARCH`), on each other batch four times.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        model: A compiled model of Keras 3 or tf_keras that has its variables.
        x: Arrays of shape (rows, ...), in a list or dictionary if the model has several inputs; or
            an iterable of batches (x,), (x, y) or (x, y, sample_weight), such as a dataset.
        y: Targets in arrays of as many rows; None with an iterable.
        sample_weight: Weights of the rows in the loss, arrays of shape (rows,), or None.
        batches: How many batches to measure on, at most. From arrays, rows are picked at random,
            always the same.
        batch_size: Rows in each batch; an iterable has its own. It matters: the loss is averaged
            over a batch, so gradients are the smaller, the larger it is. Use that of training.
        format: What gradients will be computed in, a key of `lossscale.diagnostics.FORMATS`.
        thresholds: Where the verdicts begin; None for the defaults.
        quick: Whether to compute in float32 only, once for each batch. The verdict is then a
            prediction, and cannot see what becomes of gradients that are computed from lost ones.
            So it is for other formats than float16.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict`, `reason`, `recommended_scale` and `tensors`.

    Raises:
        ArgumentTypeError: If it is no model of a supported framework. It is a `TypeError`.
        ArgumentError: If it is not compiled, has no loss or no variables, or the data or another
            argument cannot be used. It is a `ValueError`.

    Example:
        >>> diagnose("model", [1.0])
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentTypeError: The first argument must be a compiled model of Keras 3
        or tf_keras. Received: 'model' of type str.
    """
    require("numpy")
    # Not at the top: it needs NumPy, which the callbacks do without until they are used.
    from lossscale.diagnostics.batches import batches_of

    known = number_format(format)
    limits = thresholds or Thresholds()
    quick_only = checked_truth("quick", quick, ArgumentTypeError)
    sizes = {
        "batches": checked_count("batches", batches),
        "batch_size": checked_count("batch_size", batch_size),
    }
    module = registry.diagnose_for(model)
    if module is None:
        raise ArgumentTypeError(
            "The first argument must be a compiled model of Keras 3 or tf_keras. "
            f"Received: {model!r} of type {type(model).__name__}."
        )
    data = batches_of(x, y, sample_weight, **sizes)
    report: GradientReport = module.measure(
        model, data, after_batch, thresholds=limits, quick=quick_only or known.name != "float16"
    )
    return report.with_format(known, limits)

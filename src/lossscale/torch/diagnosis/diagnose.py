"""Measures the gradients of a PyTorch model, and leaves the model as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lossscale.checks import checked_above_zero, checked_count
from lossscale.common.diagnosis import (
    ModelGradients,
    OfUser,
    check_batches,
    checked_reference,
    first_batches,
    measured,
)
from lossscale.common.probing import Probe, described
from lossscale.diagnostics.fidelity_meter import fidelity_at
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.measurement import NARROW
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.verdict import Thresholds
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.optimizer import LossScaleOptimizer
from lossscale.torch.diagnosis.kept import same_random_numbers, tensors_in
from lossscale.torch.diagnosis.model_gradients import (
    Differentiation,
    LossFn,
    named_trainable,
    on_host,
)
from lossscale.torch.diagnosis.tapping import TappedModel, plain
from lossscale.torch.exponents import count_bins
from lossscale.torch.exponents import on_host as table_on_host
from lossscale.torch.ranks import local

_REFERENCES = {"float32": torch.float32, "float64": torch.float64}


def diagnose(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    max_batches: int = 4,
    in_use: Any = None,
    reference: str = "float32",
    format: str | NumberFormat = "float16",
    thresholds: Thresholds | None = None,
    quick: bool = False,
    after_batch: Callable[[int], None] = lambda number: None,
) -> GradientReport:
    """Measures what float16 makes of a model's gradients, and says whether it needs loss scaling.

    On each batch `loss_fn(model, batch)` is called and derived several times: with automatic
    casting off, for the reference; and under `torch.autocast` to float16, at several loss scales.
    No step is taken. The model is left as it was, bit for bit: parameters, buffers such as the
    statistics of a normalization, `.grad`, training flags, and the states of random numbers, which
    are the same in every run. A batch is handed over as a copy.

    A model in evaluation mode is put into training mode meanwhile; one in training mode keeps the
    modes of its modules. A model whose parameters are float16 is measured as it is, beside a copy
    of it in float32. Compiled models run as they were written.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        model: The model, with its parameters on their device. Of `DistributedDataParallel` take
            `model.module`.
        loss_fn: Called with the model and one of the batches, returns the loss, not scaled: a
            tensor with one element. Needs no `autocast`; one inside is set to what is measured.
        batches: An iterable of batches, such as a `DataLoader`. What a batch is only `loss_fn`
            has to know. Its size matters: the loss is averaged over it, so gradients are the
            smaller, the larger it is. Use that of training.
        max_batches: How many batches to measure on, at most.
        in_use: The loss scale that the model trains with, which is measured as well: a
            `LossScaleOptimizer`, a `GradScaler`, a number, or None.
        reference: "float32" or "float64". For float64 the model is copied.
        format: What gradients will be computed in, a key of `lossscale.diagnostics.FORMATS`.
            Another one than float16 is predicted from the reference.
        thresholds: Where the verdicts begin; None for the defaults.
        quick: Whether to compute the reference only, once on each batch, and predict.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict`, `reason`, `recommended_scale` and `fidelity`.

    Raises:
        ArgumentTypeError: If the model, the batches or the loss are something else. It is a
            `TypeError`.
        ArgumentError: If there is nothing to train, no batch, or no loss that can be derived. It is
            a `ValueError`.
        UnsupportedError: If parameters are spread over processes.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return (model(batch) - 1).abs().mean() / 2**30
        >>> report = diagnose(model, loss_fn, [torch.ones(2, 3)])
        >>> report.verdict.value, report.recommended_scale > 1
        ('required', True)
    """
    known, limits = number_format(format), thresholds or Thresholds()
    checked_count("max_batches", max_batches)
    dtype = checked_reference(reference, _REFERENCES)
    scale = _scale_of(in_use)
    names = _check_model(model)
    if not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` must be a function of the model and a batch that returns the loss. "
            f"Received: {loss_fn!r} of type {type(loss_fn).__name__}."
        )
    check_batches(batches, (torch.Tensor,))
    name = type(getattr(model, "_orig_mod", model)).__name__
    tapped_model = TappedModel(model, name)
    paths = _paths(names, name)
    # Copies of tensors that are made in inference mode cannot be derived by.
    with torch.inference_mode(False):
        differentiation = Differentiation(model, loss_fn, dtype, tapped_model)
        gradients = ModelGradients(
            differentiation.reference,
            differentiation.in_float16,
            [path for path, _ in paths],
            on_host,
        )
        with same_random_numbers(differentiation.subject.devices):
            measurement, fidelity = measured(
                gradients,
                first_batches(batches, max_batches, _samples_in),
                lambda batch: None,
                _count,
                paths,
                in_use=scale,
                after_batch=after_batch,
                thresholds=limits,
                quick=bool(quick) or known.name != "float16",
            )
    if fidelity is not None:
        fidelity = dataclasses.replace(fidelity, setting="under torch.autocast")
    own = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    report = measurement.report(
        tapped_model, "PyTorch", own & set(NARROW), reference, paths, tapped_model
    )
    return dataclasses.replace(report, fidelity=fidelity).with_format(known, limits)


def probe(model: torch.nn.Module, loss_fn: LossFn, batch: Any) -> Probe:
    """Returns what measures on one batch what float16 makes of each gradient at a loss scale.

    Args:
        model: The model.
        loss_fn: As for `diagnose`.
        batch: What it is given.

    Raises:
        ArgumentError, ArgumentTypeError, UnsupportedError: As `diagnose`.
    """
    names = _check_model(model)
    name = type(getattr(model, "_orig_mod", model)).__name__
    layers = dict(_paths(names, name))

    def measure(scale: float) -> dict[str, dict[str, float]]:
        with torch.inference_mode(False):
            # The model has changed since the last time, and is left as it is now.
            tapped_model = TappedModel(model, name)
            differentiation = Differentiation(model, loss_fn, torch.float32, tapped_model)
            gradients = ModelGradients(
                differentiation.reference, differentiation.in_float16, list(layers), on_host
            )
            found = fidelity_at(gradients, OfUser(batch, 1), scale, layers)
        return described(found, layers)

    return measure


def _paths(names: Iterable[str], model: str) -> list[tuple[str, str]]:
    """The name of each parameter, and that of its module."""
    return [(plain(name), plain(name).rpartition(".")[0] or model) for name in names]


def _count(gradient: Any) -> Any:
    """The table of exponents of a gradient, on the host; a tapped one comes as a table."""
    table = count_bins(gradient) if isinstance(gradient, torch.Tensor) else gradient
    return table_on_host(table)


def _samples_in(data: Any) -> int | None:
    return next((len(tensor) for tensor in tensors_in(data) if tensor.dim()), None)


def _check_model(model: Any) -> list[str]:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"The model must be a torch.nn.Module. Received: {model!r} of type "
            f"{type(model).__name__}."
        )
    lazy = [n for n, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)]
    if lazy:
        raise ArgumentError(
            f"The parameter {lazy[0]} has no shape yet. Call the model on a batch first."
        )
    empty = [n for n, p in model.named_parameters() if p.is_meta]
    if empty:
        raise ArgumentError(
            f"The parameter {empty[0]} is on the device meta, where there are no values. Give the "
            "model its values first, such as by model.to_empty() and load_state_dict()."
        )
    names, parameters = named_trainable(model)
    if not parameters:
        raise ArgumentError(
            f"The model, a {type(model).__name__}, has no trainable parameter: none has "
            "requires_grad=True."
        )
    if any(local(parameter) is not parameter for parameter in parameters):
        raise UnsupportedError(
            "The parameters of the model are spread over processes. Ask before fully_shard(), or "
            "on a machine that holds the model as a whole."
        )
    return names


def _scale_of(in_use: Any) -> float | None:
    if in_use is None:
        return None
    if isinstance(in_use, LossScaleOptimizer):
        return float(in_use.loss_scale)
    if isinstance(in_use, torch.amp.GradScaler):
        return float(in_use.get_scale())
    return checked_above_zero("in_use", in_use)

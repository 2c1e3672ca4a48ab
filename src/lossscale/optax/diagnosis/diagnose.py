"""Measures the gradients of a loss in JAX."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.checks import checked_above_zero, checked_count
from lossscale.common.diagnosis import (
    ModelGradients,
    OfUser,
    check_batches,
    checked_reference,
    first_batches,
    measured,
)
from lossscale.common.probing import described
from lossscale.diagnostics.fidelity_meter import fidelity_at
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.measurement import NARROW
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.report_text import listed
from lossscale.diagnostics.tapping import ACTIVATION
from lossscale.diagnostics.verdict import Thresholds
from lossscale.errors import ArgumentError
from lossscale.jax.exponents import count_bins, on_host
from lossscale.optax.diagnosis.differentiation import Differentiation, check_function
from lossscale.optax.loops import loss_scale

_REFERENCES = {"float32": jnp.float32, "float64": jnp.float64}


@dataclasses.dataclass
class _Inside:
    """What the report is called, and what was looked at inside of the loss."""

    name: str
    layer_names: dict[str, str]
    untapped: tuple[str, ...] = ()


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    max_batches: int = 4,
    in_use: Any = None,
    reference: str = "float32",
    has_aux: bool = False,
    grad: Callable[..., Any] | None = None,
    format: str | NumberFormat = "float16",
    thresholds: Thresholds | None = None,
    quick: bool = False,
    after_batch: Callable[[int], None] = lambda number: None,
) -> GradientReport:
    """Measures what float16 makes of gradients, and says whether a loss needs loss scaling.

    On each batch `loss_fn(params, batch, dtype)` is derived several times: with the dtype of the
    reference, and with float16 at several loss scales. So the function that trains in float16 has
    to be one that can compute in float32 too. JAX has no policy of dtypes that could be switched
    from outside, and each library says in its own way what it computes in; an argument serves all.

    It is compiled by `jax.jit`, once for each of both, and measured is what the compiled function
    computes on this device. What XLA keeps in float32 between two operations is not lost there.
    Nothing is updated. Parameters and batches are left as they are.

    Gradients by values inside of the loss are looked at if it gives them names, with
    `jax.ad_checkpoint.checkpoint_name(x, "x")`, where they are in no loop and no branch.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        loss_fn: A pure function of the parameters, a batch and a dtype, `jnp.float16` or that of
            the reference, to which it casts what it computes with. Returns the loss, not scaled, a
            scalar. Random numbers come from keys in the batch, and are drawn in float32 and cast:
            in float16 other numbers would be drawn from the same key.
        params: The parameters: a tree of arrays, or a model of Equinox or NNX with `grad`. For the
            reference arrays in 16 bits are widened, in a batch too.
        batches: An iterable of batches, trees of arrays. Their size matters: the loss is averaged
            over a batch, so gradients are the smaller, the larger it is. Use that of training.
        max_batches: How many batches to measure on, at most.
        in_use: The loss scale that trains, which is measured as well: an optimizer's state that
            has one, a number, or None.
        reference: "float32" or "float64". The latter needs `jax_enable_x64`.
        has_aux: Whether `loss_fn` returns a pair of the loss and anything else.
        grad: What differentiates: `equinox.filter_value_and_grad`, `flax.nnx.value_and_grad` or
            another that is called as `grad(function)(params, batch)`; None for
            `jax.value_and_grad`.
        format: What gradients will be computed in, a key of `lossscale.diagnostics.FORMATS`.
            Another one than float16 is predicted from the reference.
        thresholds: Where the verdicts begin; None for the defaults.
        quick: Whether to compute the reference only, once on each batch, and predict.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict`, `reason`, `recommended_scale` and `fidelity`.

    Raises:
        ArgumentTypeError: If `loss_fn`, what it returns or `batches` are something else. It is a
            `TypeError`.
        ArgumentError: If there is nothing to train, no batch, no loss that can be derived, or
            `loss_fn` computes nothing in float16. It is a `ValueError`.

    Example:
        >>> def loss_fn(params, batch, dtype):
        ...     predicted = batch.astype(dtype) @ params["w"].astype(dtype)
        ...     return jnp.mean(predicted.astype(jnp.float32) ** 2) / 2**30
        >>> report = diagnose(loss_fn, {"w": jnp.ones((3, 1))}, [jnp.ones((2, 3))])
        >>> report.verdict.value, report.recommended_scale > 1
        ('required', True)
    """
    known, limits = number_format(format), thresholds or Thresholds()
    checked_count("max_batches", max_batches)
    dtype = _checked_reference(reference)
    scale = _scale_of(in_use)
    check_function(loss_fn)
    check_batches(batches, (jax.Array, np.ndarray))
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    differentiation = Differentiation(loss_fn, params, dtype, grad, has_aux)
    given = first_batches(batches, max_batches, _samples_in)
    first = next(given)
    differentiation.prepare(first.data)
    paths = _paths(differentiation)
    measurement, fidelity = measured(
        _gradients_of(differentiation),
        itertools.chain([first], given),
        lambda batch: None,
        _count,
        paths,
        in_use=scale,
        after_batch=after_batch,
        thresholds=limits,
        quick=bool(quick) or known.name != "float16",
    )
    if fidelity is not None:
        fidelity = dataclasses.replace(
            fidelity, setting="compiled, by the loss function with dtype=float16"
        )
    inside = _Inside(
        "this loss" if name == "<lambda>" else name,
        {ACTIVATION + value: value for value in differentiation.named_inside},
    )
    own = {leaf.dtype.name for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")}
    framework = f"JAX on {jax.default_backend()}"
    report = measurement.report(inside, framework, own & set(NARROW), reference, paths, inside)
    report = dataclasses.replace(report, fidelity=fidelity, caveats=_caveats(differentiation))
    return report.with_format(known, limits)


class FidelityProbe:
    """Measures on one batch what float16 makes of each gradient, while parameters are trained.

    Args:
        loss_fn, grad, has_aux: As for `diagnose`.
        batch: The batch.

    Raises:
        ArgumentTypeError: If `loss_fn` cannot be called so. It is a `TypeError`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        batch: Any,
        *,
        grad: Callable[..., Any] | None = None,
        has_aux: bool = False,
    ) -> None:
        check_function(loss_fn)
        self._batch = batch
        self._differentiation = Differentiation(
            loss_fn, None, jnp.float32, grad, has_aux, looks_inside=False
        )

    def prepare(self, params: Any) -> None:
        """Takes the parameters to measure, and checks the first ones.

        Raises:
            ArgumentError, ArgumentTypeError: As `diagnose`.
        """
        self._differentiation.params = params
        if not self._differentiation.names:
            self._differentiation.prepare(self._batch)

    def release(self) -> None:
        """Forgets the parameters, which a step may want to overwrite."""
        self._differentiation.params = None

    def __call__(self, scale: float) -> dict[str, dict[str, float]]:
        """Returns what was found of each gradient at a loss scale, for a record."""
        layers = dict(_paths(self._differentiation))
        gradients = _gradients_of(self._differentiation)
        return described(fidelity_at(gradients, OfUser(self._batch, 1), scale, layers), layers)


def _caveats(differentiation: Differentiation) -> tuple[str, ...]:
    """What was not looked at inside of the loss, as sentences."""
    if differentiation.hidden:
        return (
            f"Not looked into: {listed(differentiation.hidden)}. What is named in a loop, a branch "
            "or a derivative of your own has no row.",
        )
    if differentiation.named_inside:
        return ()
    return (
        "Only gradients by the parameters were looked at, and none inside of the loss. A value x "
        'has a row if the loss gives it a name: x = checkpoint_name(x, "x"), of jax.ad_checkpoint.',
    )


def _gradients_of(differentiation: Differentiation) -> ModelGradients:
    return ModelGradients(
        differentiation.reference, differentiation.in_float16, differentiation.names, np.asarray
    )


def _paths(differentiation: Differentiation) -> list[tuple[str, str]]:
    """The name of each parameter, and that of what it is in."""
    return [(name, name.rpartition("/")[0] or name) for name in differentiation.names]


_compiled_count = jax.jit(count_bins)


def _count(gradient: Any) -> Any:
    """The table of exponents of a gradient, on the host."""
    return on_host(_compiled_count(gradient))


def _samples_in(data: Any) -> int | None:
    return next((np.shape(leaf)[0] for leaf in jax.tree.leaves(data) if np.ndim(leaf)), None)


def _checked_reference(reference: Any) -> Any:
    dtype = checked_reference(reference, _REFERENCES)
    if reference == "float64" and not jax.config.jax_enable_x64:
        raise ArgumentError(
            "reference='float64' needs 64-bit numbers, which JAX leaves out: call "
            'jax.config.update("jax_enable_x64", True) first.'
        )
    return dtype


def _scale_of(in_use: Any) -> float | None:
    if in_use is None:
        return None
    if isinstance(in_use, (int, float)):
        return checked_above_zero("in_use", in_use)
    return float(np.asarray(loss_scale(in_use)))

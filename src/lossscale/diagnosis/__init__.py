"""Whether a model needs loss scaling in float16, and which rule: `diagnose` measures it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lossscale.checks import checked_count
from lossscale.errors import ArgumentTypeError
from lossscale.packages import require

if TYPE_CHECKING:
    from lossscale.diagnosis.report import Report

__all__ = ["diagnose"]


def diagnose(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    parameters: Mapping[str, Iterable[Any]] | None = None,
    batches: int = 2,
    batch_size: int = 32,
    tolerance: float = 0.1,
    after_batch: Callable[[int], None] = lambda number: None,
) -> Report:
    """Measures how accurate a Keras model's gradients are in float16, and which rule they need.

    On each batch the gradients are computed several times: in float32, and in float16 at several
    loss scales. A model that is not in float16 is computed as under `mixed_float16`; layers that
    were made with a dtype of their own keep it. No step is taken. The model, its optimizer, its
    metrics, its statistics and its random seeds are left as they were, also by an exception.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        model: A model of Keras 3 that has its variables, and is compiled unless `loss_fn` is
            given.
        x: Arrays of shape (rows, ...), in a list or dictionary if the model has several inputs; or
            an iterable of batches (x,), (x, y) or (x, y, sample_weight), such as a dataset or a
            list of tuples; or one such batch, a tuple.
        y: Targets in arrays of as many rows; None with batches.
        sample_weight: Weights of the rows in the loss, arrays of shape (rows,), or None.
        class_weight: Number of a class to the weight of its rows, as for `fit`, or None.
        loss_fn: Called with the model and a batch (x, y, sample_weight), tensors or None, returns
            the loss, a scalar tensor that is not scaled; or a dictionary of losses, each of which
            is judged by itself. None for the loss that the model was compiled with. A model with a
            `train_step` of its own needs one.
        parameters: For a dictionary of losses: name of a loss to the variables that its optimizer
            owns. A loss without an entry is judged by all.
        batches: How many batches to measure on, at most. From arrays, rows are picked at random,
            always the same.
        batch_size: Rows in each batch; an iterable has its own. It matters: the loss is averaged
            over a batch, so gradients are the smaller, the larger it is. Use that of training.
        tolerance: How wrong a gradient may be, as a share of it.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `model` is not a model of Keras 3, or `loss_fn` returns something
            else than a loss.
        ArgumentError: If its loss is not known, it has no variables, or the data or another
            argument cannot be used.

    Examples:
        >>> diagnose("model", [1.0])
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentTypeError: The first argument must be a model of Keras 3.
        Received: 'model' of type str.
    """
    require("numpy")
    # Not at the top: they need NumPy, which optimizers do without.
    from lossscale.diagnosis.batches import batches_of, checked_tolerance
    from lossscale.diagnosis.report import make_report

    checked_tolerance(tolerance)
    sizes = {
        "batches": checked_count("batches", batches),
        "batch_size": checked_count("batch_size", batch_size),
    }
    _check_is_keras(model)
    from lossscale.diagnosis.keras import KerasGradientFunction

    run = KerasGradientFunction(model, loss_fn, parameters)
    return make_report(
        run,
        batches_of(x, y, sample_weight, class_weight, **sizes),
        model=model.name,
        setting=run.setting,
        tolerance=tolerance,
        in_use=run.scale_in_use(),
        after_batch=after_batch,
    )


def _check_is_keras(model: Any) -> None:
    """Checks that a model is of Keras 3; for others the error has the line to write."""
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and keras.__version__ >= "3" and isinstance(model, keras.Model):
        return
    message = (
        "The first argument must be a model of Keras 3. "
        f"Received: {model!r} of type {type(model).__name__}."
    )
    if any(cls.__module__.startswith("tf_keras.") for cls in type(model).__mro__):
        message += (
            " For a model of tf_keras, build the same layers with Keras 3, and write "
            "new_model.set_weights(model.get_weights()); diagnose(new_model, x, y)."
        )
    elif torch is not None and isinstance(model, torch.nn.Module):
        message += " Write lossscale.torch.diagnose(model, loss_fn, batches)."
    elif callable(model):
        message += " For a loss in JAX, write lossscale.optax.diagnose(loss_fn, params, batches)."
    raise ArgumentTypeError(message)

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
    loss scales. A model that is not in float16 is run as under `mixed_float16`; layers that were
    created with a dtype keep it. No step is taken. The model, its optimizer, its metrics, its
    statistics and its random seeds stay as they were, even after an exception.

    Gradients change as a network learns. Run it at the start of training, and again later.

    Args:
        model: A built Keras 3 model, compiled unless `loss_fn` is given.
        x: Arrays of shape (rows, ...), in a list or dictionary if the model has several inputs; or
            an iterable of batches (x,), (x, y) or (x, y, sample_weight), such as a dataset or a
            list of tuples; or one such batch, a tuple.
        y: Targets in arrays with the same number of rows; None with batches.
        sample_weight: Weights of the rows in the loss, arrays of shape (rows,), or None.
        class_weight: Maps a class number to the weight of its rows, as for `fit`, or None.
        loss_fn: A function of the model and a batch (x, y, sample_weight), tensors or None, that
            returns the unscaled loss, a scalar tensor; or a dictionary of losses, each with a
            verdict. None uses the loss that the model was compiled with. A model with a custom
            `train_step` needs one.
        parameters: For a dictionary of losses: maps the name of a loss to the variables that its
            optimizer updates. A loss without an entry uses all variables.
        batches: Maximum number of batches to measure. From arrays, rows are drawn at random with a
            fixed seed.
        batch_size: Rows in each batch, unless `x` is an iterable of batches. Use the batch size of
            training: gradients of a mean shrink as the batch grows.
        tolerance: The largest relative error of a gradient that is accepted.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or read `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `model` is not a Keras 3 model, or `loss_fn` does not return a loss.
        ArgumentError: If the loss of the model is not known, the model has no variables, or the
            data or another argument is invalid.

    Examples:
        >>> diagnose("model", [1.0])
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentTypeError: The first argument must be a model of Keras 3.
        Received: 'model' of type str.
    """
    require("numpy")
    # Not at the top: they need NumPy, which the optimizers do not need.
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
    """Checks that a model is a Keras 3 model; otherwise the error has the line to write."""
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
